// Rows of metrics.jsonl, kept while the page is open and continued from where they ended; curves out of them.
import { address, get } from "./api.js";
import { useEffect, useMemo, useState } from "./html.js";

const EVERY = 2000; // ms between two looks at a live run
const store = new Map(); // run -> {rows, next, edition}

/** Ask for the rows after those that are known. */
async function advance(run, signal) {
  const known = store.get(run) ?? { rows: [], next: 0 };
  const found = await get(address("runs", run, "metrics"), { after: known.next, edition: known.edition }, signal);
  // A resumed run writes its last rows again: then the answer has all of them.
  const before = found.anew ? [] : known.rows;
  const same = !found.anew && !found.rows.length;
  store.set(run, { rows: same ? known.rows : [...before, ...found.rows], next: found.next, edition: found.edition });
}

/** {run: rows} of several runs, each looked at again while it is live. `error`: the last one, if the last look failed. */
export function useMetrics(runs) {
  const [state, setState] = useState({ rows: {}, error: null });
  const key = JSON.stringify(runs.map(({ run, live }) => [run, live]));
  useEffect(() => {
    const controller = new AbortController();
    let timer;
    const look = async (which) => {
      let error = null;
      const results = await Promise.allSettled(which.map(({ run }) => advance(run, controller.signal)));
      if (controller.signal.aborted) return;
      for (const result of results) if (result.status === "rejected") error = result.reason;
      const rows = Object.fromEntries(runs.map(({ run }) => [run, store.get(run)?.rows ?? null]));
      setState((old) => {
        const same = old.error?.message === error?.message && runs.every(({ run }) => old.rows[run] === rows[run]);
        return same && Object.keys(old.rows).length === runs.length ? old : { rows, error };
      });
      const alive = runs.filter(({ live }) => live);
      if (alive.length) timer = setTimeout(() => look(alive), document.hidden ? 5 * EVERY : EVERY);
    };
    look(runs);
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [key]);
  return state;
}

const HELD_OUT = new Set(["before", "eval", "after", "heldout"]);

/** How a metric of a row is called: those of the warm start have a prefix, since its steps are others. */
export const metricName = (phase, key) => (phase === "sft" || phase === "gate" ? `${phase}:${key}` : key);

/** The names of all numeric metrics of some rows, in order of appearance. */
export function metricNames(rows) {
  const names = new Set();
  for (const row of rows) {
    for (const key in row) {
      if (key !== "step" && key !== "phase" && typeof row[key] === "number") names.add(metricName(row.phase, key));
    }
  }
  return [...names];
}

/** The heading that a metric stands under: `time/update_s` under time, `env/a/success` under env/a, `loss` under general. */
export function groupOf(name) {
  if (name.startsWith("sft:")) return "warm start";
  if (name.startsWith("gate:")) return "gate";
  const parts = name.split("/");
  if (parts.length === 1) return "general";
  return parts[0] === "env" && parts.length > 2 ? `env/${parts[1]}` : parts[0];
}

export function useMetricNames(rowsOf) {
  return useMemo(() => {
    const names = new Set();
    for (const rows of Object.values(rowsOf)) if (rows) for (const name of metricNames(rows)) names.add(name);
    return [...names];
  }, Object.values(rowsOf));
}

/**
 * One metric of one run as {train, held}: {xs, ys} each, of training rows and of held-out evaluations. `axis`: "step", or
 * "tokens" (sampled in training rows up to there; of data: trained) or "seconds" (of updates and evaluations up to there).
 */
export function curve(rows, name, axis) {
  const train = { xs: [], ys: [] };
  const held = { xs: [], ys: [] };
  let tokens = 0;
  let seconds = 0;
  for (const row of rows) {
    if (row.phase === "train" || row.phase === "data") tokens += row.tokens ?? row.tokens_trained ?? 0;
    seconds += rowSeconds(row);
    const [phase, key] = name.startsWith("sft:") || name.startsWith("gate:") ? name.split(/:(.*)/s) : [null, name];
    if (phase === null ? row.phase === "sft" || row.phase === "gate" : row.phase !== phase) continue;
    const value = row[key];
    if (typeof value !== "number") continue;
    const into = HELD_OUT.has(row.phase) ? held : train;
    into.xs.push(axis === "tokens" ? tokens : axis === "seconds" ? seconds : row.step);
    into.ys.push(value);
  }
  return { train, held };
}

// The parts of a step that follow one another; the other times are of single episodes.
const PARTS = ["time/rollout_s", "time/batch_s", "time/update_s", "time/publish_s", "time/eval_s", "time/data_s"];

const rowSeconds = (row) => PARTS.reduce((sum, key) => sum + (typeof row[key] === "number" ? row[key] : 0), 0);

/** What the table of metrics says of a name: {unit, meaning}; its names may hold `<placeholders>`, and count for each environment. */
export function explained(table, name) {
  const bare = name.replace(/^(sft|gate):/, "").replace(/^env\/[^/]+\//, "");
  return table.find((entry) => entry.name === name || entry.name === bare) ?? table.find((entry) => patternOf(entry.name).test(bare));
}

const patterns = new Map(); // name -> RegExp

function patternOf(name) {
  if (!patterns.has(name)) patterns.set(name, pattern(name));
  return patterns.get(name);
}

const pattern = (name) => new RegExp(`^${name.split(/<[^>]*>/).map((part) => part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join(".+")}$`);

/** Exponential moving average with weight `w` of the past, corrected for its start: the first value is the first one. */
export function smoothed(ys, w) {
  if (!w) return ys;
  let sum = 0;
  let weight = 0;
  return ys.map((y) => {
    sum = w * sum + (1 - w) * y;
    weight = w * weight + (1 - w);
    return sum / weight;
  });
}
