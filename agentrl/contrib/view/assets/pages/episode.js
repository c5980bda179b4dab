// One episode: what happened turn by turn, its tokens, and why it has its reward.
import { html, useEffect } from "../js/html.js";
import { address, useApi } from "../js/api.js";
import { Evidence } from "../js/evidence.js";
import { fixed, number, plural, seconds } from "../js/format.js";
import { useKeys } from "../js/keys.js";
import { Ledger } from "../js/ledger.js";
import { Answer, Members, Outcome, Panel, Stop } from "../js/parts.js";
import { go, href } from "../js/router.js";
import { Json, pieces, Text } from "../js/text.js";
import { Message, script, Turn, UserCalls, worths } from "../js/turns.js";

const VIEWS = [["", "Turns"], ["tokens", "Tokens"], ["json", "JSON"]];

export function EpisodePage({ run, id, query }) {
  const episode = useApi(address("runs", run.run, "episodes", id));
  const ways = useWays(run, id, query, episode.data);
  const open = (other, at = query.at) => other !== null && other !== undefined && go(["run", run.run, "episode", String(other)], { ...query, at, ledger: "" });
  const change = (patch) => go(["run", run.run, "episode", id], { ...query, ...patch }, true);
  const sibling = (by) => {
    const group = episode.data?.neighbours?.group ?? [];
    open(group[group.findIndex((one) => String(one) === id) + by], "");
  };
  const next = () => open(ways.next, ways.at === null ? "" : ways.at + 1);
  const prev = () => open(ways.prev, ways.at === null ? "" : ways.at - 1);
  useKeys({
    j: next, ArrowRight: next, k: prev, ArrowLeft: prev, "[": () => sibling(-1), "]": () => sibling(1),
    ...Object.fromEntries(VIEWS.map(([view], place) => [String(place + 1), () => change({ view })])),
  });
  useEffect(() => scrollTo(0, 0), [id]);
  return html`<main class="stack"><${Answer} of=${episode} what="the episode">${(data) => html`<div class="stack">
    <${Head} run=${run} data=${data} ways=${ways} next=${next} prev=${prev} query=${query} />
    <div class="episode">
      <section class="panel">
        <header>${VIEWS.map(([view, title], place) => html`<button key=${view} class="quiet" aria-pressed=${(query.view ?? "") === view} onClick=${() => change({ view })} title=${String(place + 1)}>${title}</button>`)}</header>
        <${Shown} run=${run} data=${data} id=${id} query=${query} change=${change} />
      </section>
      <${Beside} data=${data} />
    </div></div>`}<//></main>`;
}

/** The episodes before and after: in the list that this one was opened from (`list` and `at` of the address), else in its file. */
function useWays(run, id, query, data) {
  const at = query.list !== undefined && query.at !== undefined && query.at !== "" ? Number(query.at) : null;
  const from = Math.max(0, (at ?? 0) - 1);
  const list = useApi(at === null ? null : address("runs", run.run, "episodes"), { ...Object.fromEntries(new URLSearchParams(query.list ?? "")), offset: from, limit: 3 });
  if (at === null) return { at, prev: data?.neighbours?.prev ?? null, next: data?.neighbours?.next ?? null };
  const rows = list.data?.rows ?? [];
  const place = rows.findIndex((row) => String(row.id) === id);
  return { at, total: list.data?.total, prev: place > 0 ? rows[place - 1].id : null, next: place >= 0 ? rows[place + 1]?.id ?? null : null };
}

function Head({ run, data, ways, next, prev, query }) {
  const list = query.list === undefined ? {} : Object.fromEntries(new URLSearchParams(query.list));
  return html`<header class="stack" style=${{ gap: "8px" }}>
    <div class="row apart">
      <div class="row"><h1>${pieces(String(data.task))}</h1><${Outcome} episode=${data} /><${Stop} stop=${data.stop} />
        ${(data.suspects ?? []).map((kind) => html`<span class="badge warn">${kind.replaceAll("_", " ")}</span>`)}</div>
      <div class="row">
        ${ways.at !== null && html`<a href=${href(["run", run.run, "episodes"], list)}>${number(ways.at + 1)} of ${number(ways.total)} in the list</a>`}
        <button onClick=${prev} disabled=${ways.prev === null} title="k or ←">‹ previous</button>
        <button onClick=${next} disabled=${ways.next === null} title="j or →">next ›</button>
      </div>
    </div>
    <div class="row muted">
      <span>reward <strong class="mono" style=${{ color: "var(--text)", fontSize: "15px" }}>${data.reward === null ? "none" : number(data.reward)}</strong></span>
      <span>·</span><a href=${href(["run", run.run, "episodes"], { phase: data.phase, step: data.step })}>${data.phase} ${data.step}</a>
      <span>·</span><span>${pieces(String(data.env ?? ""))}</span>
      <span>·</span><span>${plural((data.turns ?? []).length, "turn")}, ${plural(data.calls ?? 0, "call")}${data.tool_errors > 0 ? html`, <span class="bad">${plural(data.tool_errors, "tool error")}</span>` : ""}</span>
      <span>·</span><span>${plural(data.tokens, "token")} sampled in ${seconds(data.seconds)}</span>
      <span>·</span><span>${data.split ?? ""} task, member ${data.member}</span>
    </div>
    <${Siblings} run=${run} data=${data} />
  </header>`;
}

function Siblings({ run, data }) {
  const ids = data.neighbours?.group ?? [];
  const found = useApi(ids.length > 1 ? address("runs", run.run, "episodes") : null, { group: data.group, limit: 200 });
  if (ids.length < 2) return null;
  const of = new Map((found.data?.rows ?? []).map((row) => [row.id, row]));
  const members = ids.map((id) => of.get(id) ?? { id });
  return html`<div class="row"><span class="muted small">its group</span><${Members} members=${members} current=${data.id} link=${(id) => href(["run", run.run, "episode", String(id)])} /></div>`;
}

function Shown({ run, data, id, query, change }) {
  if (query.view === "tokens") return html`<${Ledger} run=${run.run} id=${id} ledgers=${data.ledgers ?? []} query=${query} onQuery=${change} />`;
  if (query.view === "json") return html`<div class="body"><${Text} value=${JSON.stringify(data, null, 2)} lines=${400} characters=${30000} /></div>`;
  const acted = (index) => (data.user_calls ?? []).filter((one) => one.turn === index);
  const rewrites = (turn) => (data.rewrites ?? []).filter((one) => one.turn === turn.index);
  const worth = worths(data);
  return html`<div class="body stack">
    ${data.error && html`<div class="notice bad"><div class="grow"><strong>${data.stop}</strong><${Text} value=${data.error} lines=${12} /></div></div>`}
    ${script(data).map(({ message, turn, acted: index }, place) => {
      if (turn) return html`<${Turn} key=${`t${turn.index}`} turn=${turn} rewrites=${rewrites(turn)} />${worth.get(turn.index) ?? ""}`;
      return message ? html`<${Message} key=${`m${place}`} message=${message} />` : html`<${UserCalls} key=${`u${index}`} made=${acted(index)} />`;
    })}
    ${data.parting && html`<article class="message" data-parting><header><span class="role user">user</span><span class="muted small">as it left: the policy was not told</span></header><${Text} value=${data.parting} /></article>`}
    ${!(data.turns ?? []).length && html`<p class="muted">The policy had no turn.</p>`}
  </div>`;
}

function Beside({ data }) {
  return html`<aside class="stack">
    <${Panel} title="Why this reward" aside=${html`<span class="mono">${data.reward === null ? "unscored" : fixed(data.reward, 3)}</span>`}><${Evidence} evidence=${data.evidence} />
      ${data.cause && html`<h3>cause</h3><${Json} value=${data.cause} />`}<//>
    ${hasContent(data.gold) && html`<${Panel} title="Gold" aside=${html`<span class="muted small">never shown to the policy</span>`}><${Json} value=${data.gold} /><//>`}
    <${Diff} diff=${data.state_diff} state=${data.state} problem=${data.state_problem} />
    <${Timing} data=${data} />
    ${(data.suspects ?? []).length > 0 && html`<${Panel} title="Signs"><dl class="against">${Object.entries(data.signs ?? {}).filter(([, value]) => typeof value === "number").map(([name, value]) => html`<dt>${SIGNS[name] ?? name}</dt><dd>${fixed(value)}</dd>`)}</dl><//>`}
    ${data.agent && html`<${Panel} title="The agent's program"><${Json} value=${data.agent} /><//>`}
    ${(data.tools ?? []).length > 0 && html`<details class="panel"><summary>Tools offered (${data.tools.length})</summary><div class="body" style=${{ padding: "0 12px 10px" }}>
      ${data.tools.map((tool) => html`<details><summary><code>${pieces(tool.function?.name ?? "?")}</code> <span class="muted small">${pieces(String(tool.function?.description ?? "").slice(0, 120))}</span></summary><${Json} value=${tool.function?.parameters ?? tool} /></details>`)}</div></details>`}
    ${hasContent(data.data) && html`<details class="panel"><summary>Task data</summary><div class="body" style=${{ padding: "0 12px 10px" }}><${Json} value=${data.data} /></div></details>`}
  </aside>`;
}

const SIGNS = { gold_answer: "of the gold answer missing", gold_calls: "of the gold calls missing", repeated: "of the text repeated", judge: "a judge apart from the rest" };

const hasContent = (value) => value !== null && value !== undefined && (typeof value !== "object" || Object.keys(value).length > 0);

function Diff({ diff, state, problem }) {
  if (!diff && !hasContent(state)) return null;
  return html`<${Panel} title="Final state" aside=${diff && html`<span class="muted small">${plural(diff.length, "change")} since the start</span>`}>
    ${problem && hasContent(state) && html`<p class="muted small">What changed is not known: ${pieces(problem)}</p>`}
    ${(diff ?? []).length > 0 && html`<table class="diff"><thead><tr><th>at</th><th>before</th><th>after</th></tr></thead><tbody>${diff.map(({ path, before, after }) => html`<tr key=${path}>
      <td><code>${pieces(path)}</code></td><td class=${before === null || before === undefined ? "" : "minus"}>${before === undefined || before === null ? "–" : html`<${Json} value=${before} lines=${6} />`}</td>
      <td class=${after === null || after === undefined ? "" : "plus"}>${after === undefined || after === null ? "–" : html`<${Json} value=${after} lines=${6} />`}</td></tr>`)}</tbody></table>`}
    ${hasContent(state) && html`<details open=${!(diff ?? []).length}><summary class="muted small">the state as JSON</summary><${Json} value=${state} lines=${16} /></details>`}
  <//>`;
}

/** Where an episode's time went: generation, tools, and the rest, waiting; for the whole and per turn. */
function Timing({ data }) {
  const total = data.timings?.episode_s ?? data.seconds;
  if (typeof total !== "number" || total <= 0) return null;
  const turns = (data.turns ?? []).map((turn) => {
    const tools = (turn.results ?? []).reduce((sum, result) => sum + (result.seconds ?? 0), 0);
    const engine = turn.timings?.sampling_s ?? Math.max(0, (turn.seconds ?? 0) - tools);
    return { index: turn.index, engine, tools, all: turn.seconds ?? engine + tools };
  });
  const engine = data.timings?.engine_s ?? turns.reduce((sum, turn) => sum + turn.engine, 0);
  const tools = data.timings?.env_s ?? turns.reduce((sum, turn) => sum + turn.tools, 0);
  const wait = Math.max(0, total - engine - tools);
  const part = (kind, value, of) => html`<i class=${kind} style=${{ width: `${(100 * value) / of}%` }} title=${`${kind} ${seconds(value)}`}></i>`;
  const longest = Math.max(...turns.map(({ all }) => all), 1e-9);
  return html`<${Panel} title="Time" aside=${html`<span class="muted">${seconds(total)}</span>`}>
    <div class="timing"><span>all</span><div class="spans">${part("engine", engine, total)}${part("tools", tools, total)}${part("wait", wait, total)}</div><span></span>
      ${turns.length > 1 && turns.slice(0, 60).map((turn) => html`<span class="muted">turn ${turn.index}</span><div class="spans">${part("engine", turn.engine, longest)}${part("tools", turn.tools, longest)}</div><span class="muted">${seconds(turn.all)}</span>`)}</div>
    <p class="small muted" style=${{ marginTop: "6px" }}><span class="key-engine"></span>generation ${seconds(engine)} <span class="key-tools"></span>environment ${seconds(tools)} <span class="key-wait"></span>waiting ${seconds(wait)}</p>
  <//>`;
}
