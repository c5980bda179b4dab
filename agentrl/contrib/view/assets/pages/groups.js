// Groups: the episodes of one task under one policy, side by side, and whether they teach anything.
import { html, useState } from "../js/html.js";
import { address, useApi } from "../js/api.js";
import { fixed, number, plural, shortened } from "../js/format.js";
import { Answer, Empty, Members, Panel, SortHead } from "../js/parts.js";
import { go, href } from "../js/router.js";
import { pieces } from "../js/text.js";

const CHUNK = 100;
const MOST = 500; // groups of a step that are asked for

/** The recorded steps of a run to choose from; `all`: also none of them. */
export function StepChoice({ run, step, change, all = true }) {
  const phases = new Map();
  for (const file of run.files) phases.set(file.step, [...(phases.get(file.step) ?? []), file.phase]);
  return html`<label class="row"><span class="muted">recorded at</span>
    <select value=${step ?? ""} aria-label="recorded step" onChange=${(event) => change({ step: event.target.value })}>
      ${all && html`<option value="">all steps</option>`}
      ${[...phases].map(([value, names]) => html`<option key=${value} value=${String(value)}>step ${value} (${names.join(", ")})</option>`)}
    </select></label>`;
}

/** The newest step of training, in which groups have more than one member; else the newest of all. */
function newest(files) {
  const train = files.filter(({ phase }) => phase === "train");
  return (train.length ? train : files).reduce((best, { step }) => (best === null || step > best ? step : best), null);
}

export function GroupsPage({ run, query }) {
  const step = query.step ?? newest(run.files);
  const change = (patch) => go(["run", run.run, "groups"], { ...query, ...patch }, true);
  const groups = useApi(address("runs", run.run, "groups"), { step, limit: MOST }, run.grows ? 5000 : 0);
  return html`<main class="stack">
    <div class="row"><${StepChoice} run=${run} step=${step} change=${change} all=${false} />
      ${["", "teach", "nothing"].map((which) => html`<button key=${which} aria-pressed=${(query.which ?? "") === which} onClick=${() => change({ which })}>${{ "": "all", teach: "those that teach", nothing: "those that teach nothing" }[which]}</button>`)}
    </div>
    <${Answer} of=${groups} what="groups">${(data) => html`<${Table} run=${run} data=${data} query=${query} change=${change} />`}<//>
  </main>`;
}

function Table({ run, data, query, change }) {
  const [shown, setShown] = useState(CHUNK);
  const { sort = "", order = "desc", which = "" } = query;
  const nothing = data.filter((group) => group.advantage_zero).length;
  const kept = data.filter(({ advantage_zero: zero }) => which === "" || (which === "nothing") === Boolean(zero));
  const sign = order === "asc" ? 1 : -1;
  const rows = sort ? [...kept].sort((a, b) => (a[sort] === null) - (b[sort] === null) || sign * (typeof a[sort] === "number" ? a[sort] - b[sort] : String(a[sort]).localeCompare(String(b[sort])))) : kept;
  const many = new Set(data.map(({ env }) => env)).size > 1;
  const head = (name, title, numeric) => html`<${SortHead} name=${name} title=${title} numeric=${numeric} sort=${sort} order=${order} onSort=${(by, way) => change({ sort: by, order: way })} />`;
  if (!data.length) return html`<section class="panel"><${Empty} title="No groups were recorded at this step">Choose another step above.<//></section>`;
  return html`<${Panel} title="Groups" aside=${html`<span class="muted">${data.length === MOST ? `the first ${MOST} groups` : plural(data.length, "group")}, ${number(nothing)} teach nothing: all members have the same reward</span>`} scroll>
    <table class="groups"><thead><tr>${head("task", "task")}${many && head("env", "environment")}${head("mean", "mean", true)}${head("std", "std", true)}<th>members, by reward</th><th></th></tr></thead>
    <tbody>${rows.slice(0, shown).map((group) => html`<tr key=${group.group} data-group=${group.group}>
      <td class="nowrap" title=${group.task}><a href=${href(["run", run.run, "episodes"], { task: group.task, step: group.step, phase: group.phase })}>${pieces(shortened(group.task))}</a></td>
      ${many && html`<td class="muted">${pieces(group.env)}</td>`}
      <td class="number">${fixed(group.mean)}</td><td class="number">${fixed(group.std)}</td>
      <td><${Members} members=${group.members} link=${(id) => href(["run", run.run, "episode", String(id)])} /></td>
      <td>${group.advantage_zero && html`<span class="badge warn" title="all members have the same reward, so none has an advantage">teaches nothing</span>`}</td>
    </tr>`)}</tbody></table>
    ${!rows.length && html`<${Empty} title="No such group at this step" />`}
    ${rows.length > shown && html`<div class="pages"><button onClick=${() => setShown(shown + CHUNK)}>Show more of ${number(rows.length - shown)}</button></div>`}
  <//>`;
}
