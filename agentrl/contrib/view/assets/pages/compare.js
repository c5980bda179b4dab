// Two runs, or two steps of one: the same tasks side by side, won and lost ones first; a pair of episodes turn by turn.
import { html, useEffect, useState } from "../js/html.js";
import { address, useApi } from "../js/api.js";
import { Evidence } from "../js/evidence.js";
import { fixed, number, plural, shortened } from "../js/format.js";
import { useKeys } from "../js/keys.js";
import { Answer, Empty, Members, Outcome, Panel, Stop } from "../js/parts.js";
import { go, href } from "../js/router.js";
import { pieces } from "../js/text.js";
import { Message, script, Turn } from "../js/turns.js";

const CHUNK = 100;
const AGAIN = 1500; // ms

/** A side of the comparison, `RUN:FILE`, in its parts. A run's id has no colon. */
const parted = (side) => {
  const cut = (side ?? "").lastIndexOf(":");
  return cut < 0 ? [side ?? "", ""] : [side.slice(0, cut), side.slice(cut + 1)];
};

const last = (files) => files[files.length - 1];
const ofPhase = (files, phase) => files.filter((one) => one.phase === phase);

/** The file of a side that matches another's: of its phase and step, of its phase, of held-out tasks too. */
const matching = (files, like) => last(ofPhase(files, like.phase).filter(({ step }) => step === like.step)) ?? last(ofPhase(files, like.phase))
  ?? (like.phase === "train" ? undefined : last(files.filter(({ phase }) => phase !== "train"))) ?? last(files);

/** The preset of both sides: before and after of one run; of two runs the same phase, at the last step that both have. */
export function preset(a, b, same) {
  const held = a.filter(({ phase }) => phase !== "train");
  if (same && held.length > 1) return [held[0], last(held)];
  for (const phase of ["after", "eval", "before", "train"]) {
    const [own, others] = [ofPhase(a, phase), ofPhase(b, phase)];
    const shared = last(own.filter(({ step }) => others.some((one) => one.step === step))) ?? last(own);
    if (own.length && others.length) return [shared, matching(b, shared)];
  }
  const first = last(held) ?? last(a);
  return [first, first && matching(b, first)];
}

const change = (query, patch) => go(["compare"], { ...query, ...patch }, true);

export function ComparePage({ runs, query }) {
  const [a, stepA] = parted(query.a);
  const [b, stepB] = parted(query.b);
  const ready = a && b && stepA && stepB;
  // A run whose episodes are still being read: asked again until they are.
  const [missing, setMissing] = useState(false);
  const found = useApi(ready ? "api/compare" : null, { a: query.a, b: query.b }, missing ? AGAIN : 0);
  const reading = found.error?.status === 404;
  useEffect(() => setMissing(reading), [reading]);
  const [unread, setUnread] = useState(false);
  const [one, other] = [useApi(a ? address("runs", a) : null, {}, unread ? AGAIN : 0), useApi(b ? address("runs", b) : null, {}, unread ? AGAIN : 0)];
  const [filesA, filesB] = [one.data?.steps ?? [], other.data?.steps ?? []];
  const some = [...filesA, ...filesB].some(({ episodes }) => episodes === null);
  useEffect(() => setUnread(some), [some]);
  useEffect(() => {
    if (!a || !b || (stepA && stepB) || !filesA.length || !filesB.length) return;
    const given = (files, name) => files.find(({ file }) => file === name);
    const [left, right] = stepA ? [given(filesA, stepA), given(filesA, stepA) && matching(filesB, given(filesA, stepA))]
      : stepB ? [given(filesB, stepB) && matching(filesA, given(filesB, stepB)), given(filesB, stepB)] : preset(filesA, filesB, a === b);
    if (left && right) change(query, { a: `${a}:${left.file}`, b: `${b}:${right.file}` });
  }, [a, b, stepA, stepB, filesA.length, filesB.length]);
  const set = (side) => (run, step) => go(["compare"], { ...query, [side]: step ? `${run}:${step}` : run, task: "", env: "", content: "", ia: "", ib: "" }, true);
  return html`<main class="stack">
    <div class="sides">
      <${Side} name="a" runs=${runs} run=${a} step=${stepA} set=${set("a")} detail=${one} />
      <${Side} name="b" runs=${runs} run=${b} step=${stepB} set=${set("b")} detail=${other} />
    </div>
    ${!ready && html`<${Empty} title="Choose two sides">Two runs, or two steps of one run: episodes of the same tasks are laid side by side.<//>`}
    ${ready && html`<${Answer} of=${found} what="both sides">${(data) => html`<${Compared} data=${data} query=${query} a=${a} b=${b} />`}<//>`}
  </main>`;
}

/** The choice of a run and of a step of it. */
function Side({ name, runs, run, step, set, detail }) {
  const files = detail.data?.steps ?? [];
  return html`<div class="panel"><div class="body row"><strong class="side-${name}">${name.toUpperCase()}</strong>
    <select aria-label=${`run of side ${name}`} value=${run} onChange=${(event) => set(event.target.value, "")}>
      <option value="">choose a run</option>${runs.map((one) => html`<option key=${one.run} value=${one.run}>${one.name}</option>`)}</select>
    <select aria-label=${`step of side ${name}`} value=${step} disabled=${!files.length} onChange=${(event) => set(run, event.target.value)}>
      ${!files.length && html`<option value="">${detail.data ? "no recorded episodes" : "loading"}</option>`}
      ${files.map((one) => html`<option key=${one.file} value=${one.file}>${one.phase} ${one.step}${one.episodes === null ? ", being read" : `: ${plural(one.episodes, "episode")}`}</option>`)}</select>
    ${detail.error && html`<span class="bad small">${detail.error.message}</span>`}
  </div></div>`;
}

const apart = ({ a, b }) => (mean(a, "reward") === null || mean(b, "reward") === null ? null : mean(b, "reward") - mean(a, "reward"));
const mean = (members, key) => {
  const known = members.map((member) => member[key]).filter((value) => value !== null && value !== undefined).map(Number);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
};

/** The verdicts of the server (queries.verdict), with their colors: won is B's. */
const COLORS = { won: "good", lost: "bad", "both solved": "", "neither solved": "", same: "", unknown: "" };
const decided = ({ verdict }) => verdict === "won" || verdict === "lost";

function Compared({ data, query, a, b }) {
  const [shown, setShown] = useState(CHUNK);
  const { pairs } = data;
  const known = pairs.filter((pair) => pair.verdict !== "unknown"); // of both sides
  const count = (which) => pairs.filter((pair) => pair.verdict === which).length;
  // Won and lost ones first; within each the order of the server, which is by how far they are apart.
  const kept = query.show ? pairs.filter((pair) => pair.verdict === query.show) : [...pairs].sort((one, other) => decided(other) - decided(one));
  const place = kept.findIndex((pair) => pair.task === query.task && pair.env === query.env && (!query.content || pair.content === query.content));
  const open = (pair) => pair && change(query, { task: pair.task, env: pair.env, content: pair.content, ia: "", ib: "" });
  useKeys({ j: () => open(kept[place + 1]), ArrowDown: () => open(kept[place + 1]), k: () => open(kept[place - 1]), ArrowUp: () => open(kept[place - 1]) });
  if (!pairs.length) return html`<${Empty} title="The two sides have no task in common">${number(data.only_a.length)} tasks are only in A, ${number(data.only_b.length)} only in B. Held-out tasks (before, eval, after) are the same in runs of one environment and seed.<//>`;
  const side = (members, run) => html`<${Members} members=${members.slice(0, 16)} link=${(id) => href(["run", run, "episode", String(id)])} />`;
  return html`<div class="stack">
    <div class="row">
      ${["", ...Object.keys(COLORS).filter((which) => count(which))].map((which) => html`<button key=${which} aria-pressed=${(query.show ?? "") === which} onClick=${() => change(query, { show: which })}>${which ? `${count(which)} ${which}` : `all ${pairs.length}`}</button>`)}
      <span class="muted">mean success A ${fixed(mean(known.flatMap((pair) => pair.a), "success"), 3)}, B ${fixed(mean(known.flatMap((pair) => pair.b), "success"), 3)}; won: B solved the task more often than A</span>
      ${data.only_a.length + data.only_b.length > 0 && html`<span class="muted">${plural(data.only_a.length, "task")} only in A, ${number(data.only_b.length)} only in B</span>`}
    </div>
    <${Panel} title="Tasks" scroll><div class="scroll" style=${{ maxHeight: place >= 0 ? "30vh" : "70vh" }}><table class="pairs">
      <thead><tr><th></th><th>task</th><th>environment</th><th class="side-a">A</th><th class="side-b">B</th><th class="number">reward A</th><th class="number">reward B</th><th class="number">B − A</th></tr></thead>
      <tbody>${kept.slice(0, shown).map((pair, row) => html`<tr key=${`${pair.env} ${pair.task} ${pair.content}`} class=${row === place ? "chosen" : ""} data-verdict=${pair.verdict}>
        <td><span class="badge ${COLORS[pair.verdict]}">${pair.verdict}</span></td>
        <td class="clip"><button class="link" onClick=${() => open(pair)}>${pieces(shortened(pair.task, 40))}</button></td><td class="muted">${pieces(pair.env)}</td>
        <td>${side(pair.a, a)}</td><td>${side(pair.b, b)}</td>
        <td class="number">${fixed(mean(pair.a, "reward"))}</td><td class="number">${fixed(mean(pair.b, "reward"))}</td><td class="number">${fixed(apart(pair))}</td>
      </tr>`)}</tbody></table>
      ${kept.length > shown && html`<div class="pages"><button onClick=${() => setShown(shown + CHUNK)}>Show more of ${number(kept.length - shown)}</button></div>`}</div><//>
    ${place >= 0 ? html`<${Pair} pair=${kept[place]} query=${query} a=${a} b=${b} />` : html`<p class="muted">Choose a task to see both episodes turn by turn (j / k).</p>`}
  </div>`;
}

/** Two episodes of a task, aligned turn by turn. */
function Pair({ pair, query, a, b }) {
  const idA = query.ia || pair.a[0]?.id;
  const idB = query.ib || pair.b[0]?.id;
  const one = useApi(idA === undefined ? null : address("runs", a, "episodes", String(idA)));
  const other = useApi(idB === undefined ? null : address("runs", b, "episodes", String(idB)));
  const choose = (key, members, id) => members.length > 1 && html`<select aria-label=${`episode of side ${key.slice(1)}`} value=${id} onChange=${(event) => change(query, { [key]: event.target.value })}>
    ${members.map((member, place) => html`<option value=${member.id}>${place}: reward ${number(member.reward, 3)}</option>`)}</select>`;
  const head = (name, run, members, id, found) => html`<div class="cell row"><strong class="side-${name}">${name.toUpperCase()}</strong> ${choose(`i${name}`, members, id)}
    ${found.data && html`<${Outcome} episode=${found.data} /><${Stop} stop=${found.data.stop} /><span class="muted">reward ${number(found.data.reward)}, ${plural(found.data.turns.length, "turn")}</span>`}
    <a href=${href(["run", run, "episode", String(id)])}>open</a></div>`;
  return html`<${Panel} title=${pieces(pair.task)} scroll>
    <div class="sides" style=${{ gap: 0 }}>${head("a", a, pair.a, idA, one)}${head("b", b, pair.b, idB, other)}</div>
    ${(one.error || other.error) && html`<${Empty} title=${(one.error ?? other.error).message} />`}
    ${one.data && other.data ? html`<${Aligned} a=${one.data} b=${other.data} />` : html`<div class="empty">Loading both episodes…</div>`}
  <//>`;
}

/** What is compared of a turn: its text and its calls, without what always differs (ids of calls, times). */
const said = (part) => (part === undefined ? "" : JSON.stringify(part.turn ? [part.turn.message?.content, (part.turn.message?.tool_calls ?? []).map(({ name, arguments: given }) => [name, given]), (part.turn.results ?? []).map(({ content }) => content)] : part.message.content));

/** The two scripts in rows: what comes before the first turn, then turn by turn; messages between turns go with the next turn. */
function rowsOf(a, b) {
  const split = (episode) => {
    const rows = [[]];
    for (const part of script(episode)) {
      if (part.acted !== undefined) continue;
      if (part.turn) rows.push([]);
      rows[rows.length - 1].push(part);
    }
    return rows;
  };
  const [one, other] = [split(a), split(b)];
  return Array.from({ length: Math.max(one.length, other.length) }, (_, place) => [one[place] ?? [], other[place] ?? []]);
}

function Aligned({ a, b }) {
  const parts = (found) => (found.length ? found.map(({ message, turn }, place) => (turn ? html`<${Turn} key=${place} turn=${turn} />` : html`<${Message} key=${place} message=${message} />`)) : html`<p class="muted small">had ended</p>`);
  return html`<div class="sides aligned" style=${{ gap: 0 }}>
    ${rowsOf(a, b).map(([one, other], row) => {
      const differs = row > 0 && JSON.stringify(one.map(said)) !== JSON.stringify(other.map(said));
      return html`<div class="cell ${differs ? "differs" : ""}" key=${`a${row}`} data-row=${row}>${parts(one)}</div><div class="cell ${differs ? "differs" : ""}" key=${`b${row}`}>${parts(other)}</div>`;
    })}
    <div class="cell"><h3>why this reward</h3><${Evidence} evidence=${a.evidence} /></div><div class="cell"><h3>why this reward</h3><${Evidence} evidence=${b.evidence} /></div>
  </div>`;
}
