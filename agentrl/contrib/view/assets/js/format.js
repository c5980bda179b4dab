// Numbers and times as people read them. Unknown is a dash.

export const NONE = "–";
const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** Whole numbers with thousands apart; others with four significant digits, tiny and huge ones with an exponent. */
export function number(value, digits = 4) {
  if (typeof value !== "number" || !Number.isFinite(value)) return value === null || value === undefined ? NONE : String(value);
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return grouped.format(value);
  const size = Math.abs(value);
  if (size < 1e-4 || size >= 1e9) return value.toExponential(2);
  if (size >= 1000) return grouped.format(value);
  return String(Number(value.toPrecision(digits)));
}

/** A share or reward with a fixed number of digits, so that columns line up. */
export const fixed = (value, digits = 2) => (typeof value === "number" ? value.toFixed(digits) : NONE);

export function seconds(value) {
  if (typeof value !== "number") return NONE;
  if (value < 0.001) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 90) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 90) return `${minutes} min ${String(Math.round(value % 60)).padStart(2, "0")} s`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

export function compact(value) {
  if (typeof value !== "number") return NONE;
  if (Math.abs(value) < 10000) return grouped.format(value);
  for (const [size, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size) return `${Number((value / size).toPrecision(3))} ${sign}`;
  }
  return String(value);
}

/** A time of day, with its date if it is not today's. `value`: seconds since 1970, or an ISO text. */
export function when(value) {
  if (value === null || value === undefined) return NONE;
  const date = new Date(typeof value === "number" ? value * 1000 : value);
  if (Number.isNaN(date.getTime())) return String(value);
  const two = (n) => String(n).padStart(2, "0");
  const clock = `${two(date.getHours())}:${two(date.getMinutes())}`;
  const today = date.toDateString() === new Date().toDateString();
  return today ? clock : `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock}`;
}

/** A long name with its middle left out: names of tasks differ at their ends. */
export const shortened = (text, most = 34) => (text.length <= most ? text : `${text.slice(0, most - 13)}…${text.slice(-12)}`);

/** How an episode is called in links: of `step_000040.87` row 87 of step 40. */
export function called(id) {
  const found = /^([a-z]+)(?:_0*(\d+))?\.(\d+)$/.exec(String(id));
  return found ? `${found[1]}${found[2] === undefined ? "" : ` ${found[2]}`} #${found[3]}` : String(id);
}

export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;
