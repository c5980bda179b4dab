// Why episodes failed, the most frequent reason first.
import { html } from "../js/html.js";
import { address, useApi } from "../js/api.js";
import { called, number, plural } from "../js/format.js";
import { Answer, Empty, Panel } from "../js/parts.js";
import { go, href } from "../js/router.js";
import { Text } from "../js/text.js";
import { StepChoice } from "./groups.js";

const KINDS = {
  error: "the episode ended by an error", stop: "it was cut off", call: "a call could not be parsed", tool: "a tool answered with an error",
  term: "a part of the reward is missing", unscored: "a part of the reward could not be scored",
};

export function FailuresPage({ run, query }) {
  const asked = { step: query.step };
  const failures = useApi(address("runs", run.run, "failures"), asked, run.grows ? 5000 : 0);
  const change = (patch) => go(["run", run.run, "failures"], { ...query, ...patch }, true);
  return html`<main class="stack">
    <div class="row"><${StepChoice} run=${run} step=${query.step} change=${change} />
      ${["", ...Object.keys(KINDS)].map((kind) => html`<button key=${kind} aria-pressed=${(query.kind ?? "") === kind} onClick=${() => change({ kind })} title=${KINDS[kind]}>${kind || "all kinds"}</button>`)}</div>
    <${Answer} of=${failures} what="failures">${(data) => html`<${Table} run=${run} rows=${data.filter(({ kind }) => !query.kind || kind === query.kind)} />`}<//>
  </main>`;
}

function Table({ run, rows }) {
  if (!rows.length) return html`<section class="panel"><${Empty} title="No failures here">Every recorded episode that was scored succeeded, or the kind does not occur.<//></section>`;
  const most = Math.max(...rows.map(({ episodes }) => episodes));
  return html`<${Panel} title="Failures" aside=${html`<span class="muted">${plural(rows.length, "reason")}; an episode may have several</span>`} scroll>
    <table class="failures"><thead><tr><th class="number">episodes</th><th></th><th>kind</th><th>reason</th><th>examples</th></tr></thead>
    <tbody>${rows.map(({ reason, kind, episodes, examples }) => html`<tr key=${`${kind} ${reason}`}>
      <td class="number">${number(episodes)}</td><td><span class="share" style=${{ width: "90px" }}><i style=${{ width: `${(100 * episodes) / most}%` }}></i></span></td>
      <td title=${KINDS[kind]}><span class="badge ${kind === "error" || kind === "unscored" ? "bad" : kind === "term" ? "" : "warn"}">${kind}</span></td>
      <td><${Text} value=${reason} lines=${6} characters=${600} /></td>
      <td class="nowrap">${examples.slice(0, 3).map((id) => html`<a class="spaced" href=${href(["run", run.run, "episode", String(id)])}>${called(id)}</a>`)}</td>
    </tr>`)}</tbody></table><//>`;
}
