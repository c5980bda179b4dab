// The episodes of a run: facets with counts, filters, a sorted page of rows.
import { html, useEffect, useRef, useState } from "../js/html.js";
import { address, useApi } from "../js/api.js";
import { compact, fixed, number, plural, seconds, shortened } from "../js/format.js";
import { useKeys } from "../js/keys.js";
import { Answer, Empty, Outcome, Panel, SortHead, Stop } from "../js/parts.js";
import { go, href, search } from "../js/router.js";
import { pieces } from "../js/text.js";

const PAGE = 100;
export const FILTERS = ["phase", "step", "env", "task", "stop", "tool", "error", "term", "success", "min_reward", "max_reward", "group", "q"];
const EVERY = 3000;

/** What of an address the server filters and sorts by. */
export const listQuery = (query) => Object.fromEntries([...FILTERS, "sort", "order"].map((name) => [name, query[name]]).filter(([, value]) => value));

export function EpisodesPage({ run, query }) {
  const asked = listQuery(query);
  const offset = Math.max(0, Number(query.offset) || 0);
  const path = (part) => address("runs", run.run, part);
  const list = useApi(path("episodes"), { ...asked, offset, limit: PAGE }, run.grows ? EVERY : 0);
  const facets = useApi(path("facets"), {}, run.grows ? 2 * EVERY : 0);
  const change = (patch) => go(["run", run.run, "episodes"], { ...query, offset: "", ...patch }, true);
  return html`<main class="browse">
    <aside class="panel facets" aria-label="filters">
      <${Narrow} query=${query} change=${change} />
      ${facets.data && Object.entries(facets.data).map(([name, values]) => html`<${Facet} key=${name} name=${name} values=${values} query=${query} change=${change} />`)}
    </aside>
    <div class="stack grow">
      <${Chips} query=${query} change=${change} />
      <${Answer} of=${list} what="episodes">${(data) => html`<${List} run=${run} data=${data} query=${query} asked=${asked} offset=${offset} change=${change} />`}<//>
    </div>
  </main>`;
}

/** Search for words, success, and the range of rewards. */
function Narrow({ query, change }) {
  const [words, setWords] = useState(query.q ?? "");
  useEffect(() => setWords(query.q ?? ""), [query.q]);
  useEffect(() => {
    const timer = setTimeout(() => words !== (query.q ?? "") && change({ q: words }), 250);
    return () => clearTimeout(timer);
  }, [words]);
  const bound = (name, label) => html`<input type="number" step="any" placeholder=${label} aria-label=${`${label} reward`} value=${query[name] ?? ""} onChange=${(event) => change({ [name]: event.target.value })} />`;
  return html`<div class="stack" style=${{ padding: "8px 0", gap: "8px" }}>
    <input type="search" data-search placeholder="search words  /" title="words in messages, calls and tasks" aria-label="search episodes" value=${words} onInput=${(event) => setWords(event.target.value)}
      onKeyDown=${(event) => event.key === "Escape" && event.target.blur()} />
    <div class="row">${[["true", "solved"], ["false", "failed"], ["none", "unscored"]].map(([value, label]) => html`
      <button aria-pressed=${query.success === value} onClick=${() => change({ success: query.success === value ? "" : value })}>${label}</button>`)}</div>
    <div class="row range"><span class="muted small">reward</span> ${bound("min_reward", "least")} <span class="muted">to</span> ${bound("max_reward", "most")}</div>
  </div>`;
}

const NAMES = { env: "environment", stop: "stop reason", error: "error", term: "term", tool: "tool", task: "task", phase: "phase", step: "step" };
const SHORT = 8;
const CONDITIONS = [["", "any"], ["<0.5", "< 0.5"], [">=0.5", "≥ 0.5"], ["=none", "none"]];

function Facet({ name, values, query, change }) {
  const [all, setAll] = useState(false);
  const [narrow, setNarrow] = useState("");
  if (!values.length) return null;
  const fits = values.filter(({ value }) => String(value).toLowerCase().includes(narrow.toLowerCase()));
  const shown = all ? fits : fits.slice(0, SHORT);
  // A term may be asked for with a condition, `answer<0.5`.
  const [, chosen = query[name], condition = ""] = (name === "term" && /^(.*?)(<0\.5|>=0\.5|=none)$/.exec(query.term ?? "")) || [];
  return html`<details open=${name !== "task" || chosen !== undefined} data-facet=${name}>
    <summary>${NAMES[name] ?? name} <span class="muted">${values.length > 1 ? values.length : ""}</span></summary>
    ${all && html`<input type="search" placeholder="narrow" aria-label=${`narrow ${name}`} value=${narrow} onInput=${(event) => setNarrow(event.target.value)} style=${{ width: "100%" }} />`}
    <ul>${shown.map(({ value, episodes, reward, success }) => html`<li key=${value}>
      <button aria-pressed=${chosen === String(value)} onClick=${() => change({ [name]: chosen === String(value) ? "" : String(value) })}
        title=${`${value}: ${plural(episodes, "episode")}, mean reward ${fixed(reward)}, success ${fixed(success)}`}>
        <span class="value">${value === "" ? html`<i>no name</i>` : pieces(name === "task" ? shortened(String(value), 24) : String(value))}</span><span class="count">${compact(episodes)}</span><span class="rate">${fixed(success ?? reward)}</span></button></li>`)}</ul>
    ${name === "term" && chosen && html`<div class="row" style=${{ marginTop: "4px" }}>${CONDITIONS.map(([given, title]) => html`
      <button key=${given} aria-pressed=${condition === given} onClick=${() => change({ term: `${chosen}${given}` })}>${title}</button>`)}</div>`}
    ${fits.length > SHORT && html`<button class="link small" onClick=${() => setAll(!all)}>${all ? "fewer" : `all ${number(fits.length)}`}</button>`}
  </details>`;
}

/** The filters that are on; a click takes one off. */
function Chips({ query, change }) {
  const on = FILTERS.filter((name) => query[name]);
  if (!on.length) return null;
  return html`<div class="chips" aria-label="filters that are on">
    ${on.map((name) => html`<button class="chip" key=${name} onClick=${() => change({ [name]: "" })} title="remove">${NAMES[name] ?? name.replace("_", " ")}: ${pieces(query[name])} ×</button>`)}
    ${on.length > 1 && html`<button class="link" onClick=${() => change(Object.fromEntries(on.map((name) => [name, ""])))}>remove all</button>`}
  </div>`;
}

const COLUMNS = [
  ["step", "step", true], ["phase", "phase"], ["env", "environment"], ["task", "task"], ["member", "#", true, true], ["reward", "reward", true], ["success", "outcome"], ["stop", "stop"],
  ["turns", "turns", true], ["calls", "calls", true], ["tool_errors", "errors", true], ["tokens", "tokens", true], ["seconds", "time", true],
];

function List({ run, data, query, asked, offset, change }) {
  const [chosen, setChosen] = useState(null); // an episode: rows move when a live run writes new ones
  const body = useRef(null);
  const { rows, total } = data;
  const place = rows.findIndex(({ id }) => id === chosen);
  const many = new Set(rows.map(({ env }) => env)).size > 1 || (run.envs ?? []).length > 1;
  const columns = COLUMNS.filter(([name]) => name !== "env" || many);
  const link = (index) => href(["run", run.run, "episode", String(rows[index].id)], { list: search(asked), at: offset + index });
  const move = (by) => {
    if (!rows.length) return;
    const next = Math.min(rows.length - 1, Math.max(0, place + by));
    setChosen(rows[next].id);
    // The focus goes with it, so that Enter is the row's and not that of a button that was clicked before.
    const row = body.current?.children[next];
    row?.querySelector("a")?.focus({ preventScroll: true });
    row?.scrollIntoView({ block: "nearest" });
  };
  const turn = (to) => change({ offset: to > 0 ? to : "" });
  useEffect(() => setChosen(null), [search(asked), offset]);
  useKeys({
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    Enter: () => { if (rows[place]) location.hash = link(place); },
    n: () => { if (offset + PAGE < total) turn(offset + PAGE); },
    p: () => { if (offset > 0) turn(offset - PAGE); },
  });
  const onSort = (name, order) => change({ sort: name, order });
  if (!rows.length) {
    const filtered = FILTERS.some((name) => query[name]);
    return html`<section class="panel"><${Empty} title=${filtered ? "No episode fits these filters" : "No episodes are recorded yet"}>
      ${filtered ? html`<button class="link" onClick=${() => change(Object.fromEntries(FILTERS.map((name) => [name, ""])))}>Remove all filters</button>` : html`A run writes them after an evaluation, and every <code>trajectories_every</code> updates.`}<//></section>`;
  }
  const pager = html`<span class="muted" data-total=${total}>${number(offset + 1)}–${number(offset + rows.length)} of ${plural(total, "episode")}</span>
    <button disabled=${offset === 0} onClick=${() => turn(offset - PAGE)} title="p">‹ previous</button>
    <button disabled=${offset + rows.length >= total} onClick=${() => turn(offset + PAGE)} title="n">next ›</button>`;
  return html`<${Panel} title="Episodes" aside=${pager} scroll>
    <table class="episodes"><thead><tr>${columns.map(([name, title, numeric, fixedOrder]) => (fixedOrder ? html`<th key=${name} class="number" title=${name}>${title}</th>` : html`
      <${SortHead} key=${name} name=${name} title=${title} hint=${name.replace("_", " ")} numeric=${numeric} sort=${query.sort} order=${query.order ?? "desc"} onSort=${onSort} />`))}<th></th></tr></thead>
    <tbody ref=${body}>${rows.map((row, index) => html`<tr key=${row.id} class=${index === place ? "chosen" : ""} data-episode=${row.id}>
      ${columns.map(([name]) => cell(name, row, link(index)))}
      <td>${(row.suspects ?? []).map((kind) => html`<span class="badge warn" title="a suspect">${kind.replaceAll("_", " ")}</span> `)}</td>
    </tr>`)}</tbody></table><//>`;
}

function cell(name, row, link) {
  if (name === "task") return html`<td class="nowrap" title=${row.task}><a href=${link}>${pieces(shortened(row.task))}</a></td>`;
  if (name === "reward") return html`<td class="number"><span class="reward">${row.reward === null ? "–" : fixed(row.reward)}</span></td>`;
  if (name === "success") return html`<td><${Outcome} episode=${row} /></td>`;
  if (name === "stop") return html`<td title=${row.error ?? ""}><${Stop} stop=${row.stop} /></td>`;
  if (name === "seconds") return html`<td class="number">${seconds(row.seconds)}</td>`;
  if (name === "phase" || name === "env") return html`<td class="muted nowrap">${pieces(String(row[name] ?? ""))}</td>`;
  return html`<td class="number ${name === "tool_errors" && row[name] > 0 ? "bad" : ""}">${number(row[name])}</td>`;
}
