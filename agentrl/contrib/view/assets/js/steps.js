// The table of a run's rows of metrics: chosen columns, sorted by any of them.
import { html, useMemo, useState } from "./html.js";
import { MetricPicker } from "./curves.js";
import { number } from "./format.js";
import { explained, metricName, metricNames } from "./metrics.js";
import { Empty, Panel, SortHead } from "./parts.js";
import { href } from "./router.js";

const FIRST = ["success", "reward", "scored", "tokens", "turns", "entropy", "loss", "grad_norm", "lr", "staleness_mean", "time/rollout_s", "time/update_s"];
const CHUNK = 200;

const valueOf = (row, name) => {
  const bare = name.replace(/^(sft|gate):/, "");
  return metricName(row.phase, bare) === name ? row[bare] ?? null : null;
};

/** `sources`: [{run, label, color, rows}]; `query` and `onQuery(patch)`: columns `c` (~ between), sort, order, in the address. */
export function StepsTable({ sources, query, onQuery, table = [] }) {
  const [shown, setShown] = useState(CHUNK);
  const [picking, setPicking] = useState(false);
  const many = sources.length > 1;
  const all = useMemo(
    () => sources.flatMap(({ run, label, color, rows }) => (rows ?? []).map((row, place) => ({ run, label, color, row, place }))),
    [sources.map(({ run, rows }) => `${run}:${rows?.length}`).join()],
  );
  const names = useMemo(() => metricNames(all.map(({ row }) => row)), [all]);
  const columns = query.c === undefined ? FIRST.filter((name) => names.includes(name)) : query.c.split("~").filter(Boolean);
  const { sort = "", order = "desc" } = query;
  const rows = useMemo(() => sorted(all.filter(({ row }) => columns.some((name) => valueOf(row, name) !== null)), sort, order), [all, columns.join("~"), sort, order]);
  const onSort = (name, direction) => onQuery({ sort: name, order: direction });
  if (!names.length) return html`<${Empty} title="No steps yet">Rows appear here as the run writes them.<//>`;
  const aside = html`<span class="muted">${number(rows.length)} rows</span>
    <button aria-pressed=${picking} onClick=${() => setPicking(!picking)}>Columns</button>`;
  return html`<${Panel} title="Steps" aside=${aside} scroll>
    ${picking && html`<div style=${{ padding: "10px 12px", columnWidth: "230px" }}>
      <${MetricPicker} names=${names} chosen=${columns} onChange=${(chosen) => onQuery({ c: chosen.join("~") })} meaning=${table} /></div>`}
    <div class="scroll tall"><table class="steps">
      <thead><tr>
        ${many && html`<th>run</th>`}
        <${SortHead} name="step" sort=${sort} order=${order} onSort=${onSort} numeric />
        <th>phase</th>
        ${columns.map((name) => html`<${SortHead} key=${name} name=${name} sort=${sort} order=${order} onSort=${onSort} numeric hint=${explained(table, name)?.meaning} />`)}
      </tr></thead>
      <tbody>${rows.slice(0, shown).map(({ run, label, color, row, place }) => html`<tr key=${`${run} ${place}`}>
        ${many && html`<td><span class="dot" style=${{ color }}></span> ${label}</td>`}
        <td class="number">${row.step}</td>
        <td>${["sft", "gate"].includes(row.phase) ? row.phase : html`<a href=${href(["run", run, "episodes"], { step: row.step, phase: row.phase })}>${row.phase}</a>`}</td>
        ${columns.map((name) => html`<td class="number" key=${name}>${number(valueOf(row, name))}</td>`)}
      </tr>`)}</tbody>
    </table>
    ${rows.length > shown && html`<div class="pages"><button onClick=${() => setShown(shown + CHUNK)}>Show ${number(Math.min(CHUNK, rows.length - shown))} more of ${number(rows.length - shown)}</button></div>`}
    </div><//>`;
}

/** Newest first if nothing else is asked; rows without the value come last. */
function sorted(rows, sort, order) {
  if (!sort) return [...rows].reverse();
  const sign = order === "asc" ? 1 : -1;
  const value = ({ row }) => (sort === "step" ? row.step : valueOf(row, sort));
  return [...rows].sort((a, b) => {
    const [one, other] = [value(a), value(b)];
    if (one === null || other === null) return (one === null) - (other === null);
    return sign * (one - other);
  });
}
