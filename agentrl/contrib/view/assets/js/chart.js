// One chart: lines over a common x, with the values under the pointer in its legend. Drawing is uPlot's.
import { html, useEffect, useLayoutEffect, useMemo, useRef } from "./html.js";
import { computed, useDark } from "./colors.js";
import { compact, NONE, number } from "./format.js";

/** Columns for uPlot out of lines of their own xs: one x column of all, and null where a line has no point. */
export function aligned(lines, log) {
  const all = Float64Array.from(new Set(lines.flatMap(({ xs }) => xs))).sort();
  const place = new Map(Array.from(all, (x, index) => [x, index]));
  const columns = lines.map(({ xs, ys }) => {
    const column = new Array(all.length).fill(null);
    // A logarithm has no place for values that are not positive.
    xs.forEach((x, index) => { if (!log || ys[index] > 0) column[place.get(x)] = ys[index]; });
    return column;
  });
  return [Array.from(all), ...columns];
}

/** The y of a line at the point nearest to x. */
function nearest({ xs, values }, x) {
  if (!xs.length) return null;
  let low = 0;
  let high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < x) low = middle + 1;
    else high = middle;
  }
  return values[low > 0 && x - xs[low - 1] <= xs[low] - x ? low - 1 : low];
}

function options(lines, { log, zoom, axis, width, onZoom, onHover }) {
  const ink = computed("var(--muted)");
  const grid = { stroke: computed("var(--line)"), width: 1 };
  const ticks = { show: false };
  const font = "11px system-ui, sans-serif";
  const side = { stroke: ink, grid, ticks, font };
  return {
    width,
    height: 170,
    padding: [8, 10, 0, 0],
    legend: { show: false },
    cursor: { sync: { key: "curves" }, points: { size: 6 }, drag: { x: true, y: false, setScale: false }, bind: { dblclick: () => () => onZoom(null) } },
    scales: { x: { time: false, range: (_, low, high) => zoom ?? (low === high ? [low - 1, high + 1] : [low, high]) }, y: { distr: log ? 3 : 1 } },
    axes: [
      { ...side, size: 24, values: (_, found) => found.map((x) => (axis === "step" ? (Number.isInteger(x) ? String(x) : "") : compact(x))) },
      { ...side, size: 52, values: (_, found) => found.map((y) => (y === null ? "" : number(y, 3))) },
    ],
    series: [{}, ...lines.map((line) => ({
      stroke: computed(line.color),
      width: line.faint ? 1 : 1.6,
      alpha: line.faint ? 0.25 : 1,
      dash: line.held ? [5, 4] : undefined,
      spanGaps: true,
      points: { show: line.held || line.xs.length === 1, size: 5, fill: computed(line.color) },
    }))],
    hooks: {
      setCursor: [(plot) => onHover(plot.cursor.left >= 0 ? plot.posToVal(plot.cursor.left, "x") : null)],
      setSelect: [(plot) => {
        if (plot.select.width < 4) return;
        const ends = [plot.select.left, plot.select.left + plot.select.width].map((at) => plot.posToVal(at, "x"));
        plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
        onZoom(ends);
      }],
    },
  };
}

/**
 * `lines`: [{name, color, held, faint, xs, ys, values}], `values` being what the legend says (before smoothing).
 * `axis`: "step", "tokens" or "seconds"; `zoom`: [from, to] of x, or null for all.
 */
export function Chart({ title, unit, meaning, lines, log, axis, zoom, onZoom, onRemove }) {
  const box = useRef(null);
  const plot = useRef(null);
  const legend = useRef(null);
  const at = useRef(null);
  const pointer = useRef(null); // the x under it
  const isDark = useDark();
  const named = lines.filter((line) => !line.faint);
  const latest = useRef(named);
  latest.current = named;
  // Straight into the page: a pointer moves too often to draw everything again.
  const say = (x) => {
    pointer.current = x;
    if (!legend.current) return;
    const found = legend.current.querySelectorAll(".now");
    latest.current.forEach((line, place) => {
      if (!found[place]) return;
      const value = x === null ? line.values[line.values.length - 1] : nearest(line, x);
      found[place].textContent = value === null || value === undefined ? NONE : number(value);
    });
    at.current.textContent = x === null ? "last" : `${axis} ${compact(Math.round(x))}`;
  };
  const shape = JSON.stringify([lines.map(({ color, held, faint, xs }) => [color, held, faint, xs.length === 1]), log, zoom, axis, isDark]);
  const columns = useMemo(() => aligned(lines, log), [lines, log]);

  useLayoutEffect(() => {
    const width = Math.max(200, box.current.clientWidth);
    const settings = options(lines, { log, zoom, axis, width, onZoom, onHover: say });
    plot.current = new uPlot(settings, columns, box.current);
    const watch = new ResizeObserver(() => {
      const fits = Math.max(200, box.current?.clientWidth ?? 0);
      if (fits !== plot.current.width) plot.current.setSize({ width: fits, height: 170 });
    });
    watch.observe(box.current);
    return () => {
      watch.disconnect();
      plot.current.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => plot.current?.setData(columns), [columns]);
  useEffect(() => say(pointer.current));

  return html`<figure class="panel chart" data-metric=${title} data-points=${columns[0].length} aria-label=${`curves of ${title}`}>
    <header title=${meaning}>
      <h2>${title}</h2>${unit && unit !== title && html`<span class="muted small">${unit}</span>`}
      <span class="at" ref=${at}></span>
      ${onRemove && html`<button class="quiet" aria-label=${`remove the chart of ${title}`} onClick=${onRemove}>×</button>`}
    </header>
    <ul class="legend" ref=${legend}>${named.map((line) => html`<li>
      <span class="key ${line.held ? "held" : ""}" style=${{ borderColor: line.color }}></span>
      ${line.name && html`<span class="name">${line.name}</span>`}<span class="now"></span></li>`)}</ul>
    <div ref=${box}></div>
  </figure>`;
}
