// Curves of one or more runs over one another: which metrics, over what, how smooth. The choice is in the address.
import { html, useMemo, useState } from "./html.js";
import { Chart } from "./chart.js";
import { curve, explained, groupOf, smoothed, useMetricNames } from "./metrics.js";
import { Empty } from "./parts.js";

const FIRST = ["success", "reward", "entropy", "turns", "response_length/mean", "tool_error_rate", "reward_std", "grad_norm", "tokens", "sft:loss", "gate:success"];
const MOST_AT_FIRST = 6;

export const chosenMetrics = (query, names) => (query.m === undefined
  ? FIRST.filter((name) => names.includes(name)).slice(0, MOST_AT_FIRST)
  : query.m.split("~").filter(Boolean));

/** Metric names with a checkbox each, under their prefixes, and a field that narrows them. */
export function MetricPicker({ names, chosen, onChange, meaning = [] }) {
  const [narrow, setNarrow] = useState("");
  const shown = names.filter((name) => name.toLowerCase().includes(narrow.toLowerCase()));
  const groups = new Map();
  for (const name of shown) groups.set(groupOf(name), [...(groups.get(groupOf(name)) ?? []), name]);
  const ordered = [...groups].sort(([one], [other]) => rank(one) - rank(other));
  const flip = (name) => onChange(chosen.includes(name) ? chosen.filter((other) => other !== name) : [...chosen, name]);
  return html`<div>
    <input type="search" placeholder=${`search ${names.length} metrics`} aria-label="search metrics" value=${narrow}
      onInput=${(event) => setNarrow(event.target.value)} />
    ${ordered.map(([group, members]) => html`<details key=${group} open=${narrow !== "" || group === "general" || members.some((name) => chosen.includes(name))}>
      <summary>${group} <span class="muted">${members.length}</span></summary>
      ${members.map((name) => html`<label key=${name} title=${explained(meaning, name)?.meaning ?? name}>
        <input type="checkbox" checked=${chosen.includes(name)} onChange=${() => flip(name)} />${short(name, group)}</label>`)}
    </details>`)}
    ${!shown.length && html`<p class="muted small">No metric's name contains “${narrow}”.</p>`}
  </div>`;
}

// What a person looks at first stands first; the warm start, which is over early, last.
const rank = (group) => (group === "general" ? 0 : group.startsWith("env/") ? 1 : group === "warm start" || group === "gate" ? 3 : 2);

const short = (name, group) => (name.startsWith(`${group}/`) ? name.slice(group.length + 1) : name.replace(/^(sft|gate):/, ""));

function linesOf(runs, rowsOf, name, { axis, smooth, many }) {
  const lines = [];
  for (const { run, label, color } of runs) {
    const { train, held } = curve(rowsOf[run] ?? [], name, axis);
    const called = many ? label : "";
    if (train.xs.length) {
      if (smooth > 0) lines.push({ name: called, color, faint: true, xs: train.xs, ys: train.ys, values: train.ys });
      lines.push({ name: called || (held.xs.length ? "training" : ""), color, xs: train.xs, ys: smoothed(train.ys, smooth), values: train.ys });
    }
    if (held.xs.length) lines.push({ name: many && !train.xs.length ? `${label}, held out` : "held out", color, held: true, xs: held.xs, ys: held.ys, values: held.ys });
  }
  return lines;
}

/**
 * `runs`: [{run, label, color}], `rowsOf`: {run: rows of metrics}, `query` and `onQuery(patch)`: the options in the address:
 * m (metrics, with ~ between), x, smooth, log. `table`: the table of metrics, [{name, unit, meaning}].
 */
export function Curves({ runs, rowsOf, query, onQuery, table = [] }) {
  const [zoom, setZoom] = useState(null);
  const names = useMetricNames(rowsOf);
  const chosen = chosenMetrics(query, names);
  const axis = ["tokens", "seconds"].includes(query.x) ? query.x : "step";
  const smooth = Math.min(0.99, Math.max(0, Number(query.smooth) || 0));
  const log = query.log === "1";
  const choose = (metrics) => onQuery({ m: metrics.join("~") });
  const charts = useMemo(
    () => chosen.map((name) => ({ name, lines: linesOf(runs, rowsOf, name, { axis, smooth, many: runs.length > 1 }) })),
    [runs.map(({ run, color }) => run + color).join(), ...runs.map(({ run }) => rowsOf[run]), chosen.join("~"), axis, smooth],
  );
  if (!names.length) {
    return html`<${Empty} title="No metrics yet">A run writes its first row after the first steps of its warm start, or its first update.<//>`;
  }
  return html`<div class="curves">
    <aside class="panel picker"><div class="body" style=${{ padding: "10px 12px" }}>
      <${MetricPicker} names=${names} chosen=${chosen} onChange=${choose} meaning=${table} />
    </div></aside>
    <div class="stack grow">
      <div class="row" role="group" aria-label="how curves are drawn">
        <span class="muted">over</span>
        ${["step", "tokens", "seconds"].map((name) => html`<button aria-pressed=${axis === name} onClick=${() => { setZoom(null); onQuery({ x: name === "step" ? "" : name }); }}>${name}</button>`)}
        <label class="row" style=${{ marginLeft: "12px" }}>smooth <input type="range" min="0" max="0.98" step="0.02" value=${smooth} aria-label="smoothing"
          onInput=${(event) => onQuery({ smooth: event.target.value === "0" ? "" : event.target.value })} /><span class="muted">${smooth.toFixed(2)}</span></label>
        <label><input type="checkbox" checked=${log} onChange=${() => onQuery({ log: log ? "" : "1" })} />log scale</label>
        ${zoom && html`<button class="link" onClick=${() => setZoom(null)}>whole range</button>`}
      </div>
      <div class="charts">${charts.map(({ name, lines }) => lines.length
        ? html`<${Chart} key=${name} title=${name} unit=${explained(table, name)?.unit} meaning=${explained(table, name)?.meaning} lines=${lines} log=${log} axis=${axis}
            zoom=${zoom} onZoom=${setZoom} onRemove=${() => choose(chosen.filter((other) => other !== name))} />`
        : html`<figure class="panel chart" key=${name}><header><h2>${name}</h2><span class="at"></span>
            <button class="quiet" aria-label=${`remove the chart of ${name}`} onClick=${() => choose(chosen.filter((other) => other !== name))}>×</button></header>
            <p class="empty">None of these runs has it.</p></figure>`)}</div>
      ${!chosen.length && html`<${Empty} title="No metric is chosen">Choose some on the left.<//>`}
    </div>
  </div>`;
}
