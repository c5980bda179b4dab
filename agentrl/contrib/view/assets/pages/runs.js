// All runs: what they came to, and the curves of those that are chosen over one another.
import { html } from "../js/html.js";
import { runColors } from "../js/colors.js";
import { Curves } from "../js/curves.js";
import { compact, fixed, NONE, number, plural, seconds, when } from "../js/format.js";
import { useKeys } from "../js/keys.js";
import { useMetrics } from "../js/metrics.js";
import { Answer, Empty, Failed, Panel, Share, SortHead, Status } from "../js/parts.js";
import { go, href } from "../js/router.js";
import { StepsTable } from "../js/steps.js";
import { pieces } from "../js/text.js";

const AT_FIRST = 4;
const MOST_CURVES = 24;

/** The runs whose curves are drawn: those of the address, else the newest few. */
function chosenRuns(runs, query) {
  if (query.runs !== undefined) {
    const names = query.runs.split("~");
    return runs.filter(({ run }) => names.includes(run));
  }
  return [...runs].sort((a, b) => String(b.started ?? "").localeCompare(String(a.started ?? ""), "en", { numeric: true })).slice(0, AT_FIRST);
}

export function RunsPage({ runs, query }) {
  return html`<main class="stack"><${Answer} of=${runs} what="the runs">${(data) => (data.length
    ? html`<${Runs} runs=${data} query=${query} />`
    : html`<${Empty} title="No runs here yet">Start one: <code>agentrl train quickstart</code>, or name folders: <code>agentrl view PATH…</code>. This page finds it by itself.<//>`)}<//></main>`;
}

function Runs({ runs, query }) {
  const chosen = chosenRuns(runs, query);
  const { rows, error } = useMetrics(chosen);
  const colors = runColors(runs);
  const change = (patch) => go([], { ...query, ...patch }, true);
  const choose = (names) => change({ runs: names.join("~") || "~" });
  const names = chosen.map(({ run }) => run);
  const flip = (run) => choose(names.includes(run) ? names.filter((name) => name !== run) : [...names, run].slice(-MOST_CURVES));
  const known = rows && Object.fromEntries(chosen.map(({ run }) => [run, rows[run]]));
  // Two folders may hold runs of one name; their ids differ.
  const labelOf = (run, name) => (runs.filter((other) => other.name === name).length > 1 ? run : name);
  const drawn = chosen.map(({ run, name }) => ({ run, label: labelOf(run, name), color: colors.get(run) }));
  return html`<div class="stack">
    <${RunTable} runs=${runs} names=${names} colors=${colors} query=${query} change=${change} flip=${flip} choose=${choose} />
    ${error && html`<${Failed} error=${error} />`}
    ${chosen.length > 0 && html`<${Curves} runs=${drawn} rowsOf=${known} query=${query} onQuery=${change} />
      <details class="panel" open=${query.steps === "1"} onToggle=${(event) => event.currentTarget.open !== (query.steps === "1") && change({ steps: event.currentTarget.open ? "1" : "" })}>
        <summary>Steps of the chosen runs</summary>
        ${query.steps === "1" && html`<${StepsTable} sources=${drawn.map((one) => ({ ...one, rows: rows[one.run] }))}
          query=${{ c: query.c, sort: query.ssort, order: query.sorder }} onQuery=${(patch) => change(renamed(patch))} />`}
      </details>`}
    ${!chosen.length && html`<${Empty} title="No run is chosen">Tick runs above to lay their curves over one another.<//>`}
  </div>`;
}

// The table of runs and that of steps have an order each.
const renamed = ({ sort, order, ...rest }) => ({ ...rest, ...(sort !== undefined && { ssort: sort, sorder: order }) });

const COLUMNS = [
  ["name", "run"], ["status", "status"], ["envs", "environments"], ["updates", "updates", true], ["success_before", "before", true],
  ["success_after", "after", true], ["tokens", "tokens", true], ["seconds", "time", true], ["started", "started", true],
];

function RunTable({ runs, names, colors, query, change, flip, choose }) {
  const { sort = "started", order = "desc", find = "" } = query;
  const shown = ordered(runs.filter(({ name, envs }) => `${name} ${envs}`.toLowerCase().includes(find.toLowerCase())), sort, order);
  useKeys({ Escape: () => change({ find: "" }) });
  const compare = names.length === 2 ? href(["compare"], { a: names[0], b: names[1] }) : null;
  const aside = html`<span class="muted">${plural(runs.length, "run")}, ${number(names.length)} chosen</span>
    ${compare && html`<a href=${compare}>compare these two</a>`}
    <button class="link" onClick=${() => choose([])} disabled=${!names.length}>choose none</button>
    <input type="search" data-search placeholder="find a run  /" aria-label="find a run" value=${find} onInput=${(event) => change({ find: event.target.value })} />`;
  return html`<${Panel} title="Runs" aside=${aside} scroll tall>
    <table class="runs">
      <thead><tr><th><span class="muted">curve</span></th>${COLUMNS.map(([name, title, numeric]) => html`
        <${SortHead} key=${name} name=${name} title=${title} numeric=${numeric} sort=${sort} order=${order} onSort=${(by, way) => change({ sort: by, order: way })} />`)}</tr></thead>
      <tbody>${shown.map((run) => html`<tr key=${run.run} data-run=${run.run}>
        <td class="nowrap"><input type="checkbox" checked=${names.includes(run.run)} onChange=${() => flip(run.run)} aria-label=${`curves of ${run.name}`} />
          <span class="dot" style=${{ color: colors.get(run.run), opacity: names.includes(run.run) ? 1 : 0.35 }}></span></td>
        <td><a href=${href(["run", run.run])} title=${run.path}>${pieces(run.name)}</a></td>
        <td><${Status} run=${run} /></td>
        <td class="muted clip">${pieces((run.envs ?? []).join(", "))}</td>
        <td class="number">${progress(run)}</td>
        <td class="number">${fixed(run.success_before)}</td>
        <td class="number"><${Share} value=${run.success_after} /></td>
        <td class="number">${compact(run.tokens)}</td>
        <td class="number">${seconds(run.seconds)}</td>
        <td class="number">${when(run.started)}</td>
      </tr>`)}</tbody>
    </table>
    ${!shown.length && html`<${Empty} title=${`No run is called “${find}”`}>Esc shows all.<//>`}
  <//>`;
}

const progress = ({ updates, steps }) => (typeof updates !== "number" ? NONE : updates === steps || typeof steps !== "number" ? number(updates) : `${number(updates)} / ${number(steps)}`);

function ordered(runs, sort, order) {
  const sign = order === "asc" ? 1 : -1;
  return [...runs].sort((a, b) => {
    const [one, other] = [a[sort] ?? null, b[sort] ?? null];
    if (one === null || other === null) return (one === null) - (other === null);
    return sign * (typeof one === "number" ? one - other : String(one).localeCompare(String(other), "en", { numeric: true }));
  });
}
