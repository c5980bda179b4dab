// An episode turn by turn: what was asked, said, called and answered.
import { html } from "./html.js";
import { fixed, number, seconds } from "./format.js";
import { Arguments, Text, pieces } from "./text.js";

/** The calls of a turn, each with its answer: [{call, result}]; answers of no known call come last. */
export function calls(turn) {
  const left = [...(turn.results ?? [])];
  const made = (turn.message?.tool_calls ?? []).map((call) => {
    const place = left.findIndex((result) => result.call_id === call.id);
    return { call, result: place < 0 ? null : left.splice(place, 1)[0] };
  });
  return [...made, ...left.map((result) => ({ call: null, result }))];
}

/** The messages before the first turn of the policy, the turns, and the messages between them that are no answers of tools.
 * `acted`: where the calls stand that the user made to tools of its own in answer to a turn (-1: before its first words, or, if the
 * opening has none, before the first turn). */
export function script(episode) {
  const found = [];
  let turn = 0;
  const turns = episode.turns ?? [];
  for (const message of episode.messages ?? []) {
    if (message.role === "assistant" && turn < turns.length && same(message, turns[turn].message)) found.push({ turn: turns[turn++] });
    else if (message.role !== "tool") found.push({ message });
  }
  // A context policy may have taken turns out of the messages: they were played, and are shown all the same.
  found.push(...turns.slice(turn).map((one) => ({ turn: one })));
  const first = found.findIndex((one) => one.turn);
  const end = first < 0 ? found.length : first;
  const opened = found.slice(0, end).findLastIndex(({ message }) => message.role === "user");
  found.splice(opened < 0 ? end : opened, 0, { acted: -1 });
  return found.flatMap((one) => (one.turn ? [one, { acted: one.turn.index }] : [one]));
}

const same = (message, played) => played && message.content === played.content && (message.tool_calls ?? []).length === (played.tool_calls ?? []).length;

/** What the simulated user did with its own tools in answer to a turn (-1: before its first words); the policy sees none of it. */
export function UserCalls({ made }) {
  if (!made.length) return null;
  return html`<article class="message user-calls" data-user-calls=${made.length}>
    <header><span class="role user">user</span><span class="muted small">with tools of its own, which the policy does not see</span></header>
    ${made.map((one) => html`${one.text && html`<${Text} value=${one.text} />`}<${Call} call=${one.call} />${one.result ? html`<${Result} result=${one.result} />` : html`<p class="muted small">no answer: the episode ended before it</p>`}`)}
  </article>`;
}

/** The images of a message or of an answer; their lines stand in its text. */
const Pictures = ({ of }) => (of.images ?? []).map((image) => (image.src ? html`<img class="picture" src=${image.src} alt=${image.alt} title=${image.alt} />` : html`<p class="bad small">${pieces(image.alt)}</p>`));

export const Message = ({ message }) => html`<article class="message">
  <header><span class="role ${message.role}">${message.role}</span>${message.name && html`<code>${pieces(message.name)}</code>`}</header>
  ${message.reasoning && html`<div class="reasoning"><${Text} value=${message.reasoning} /></div>`}
  <${Text} value=${message.content} />
  <${Pictures} of=${message} />
  ${(message.tool_calls ?? []).map((call) => html`<${Call} call=${call} />`)}
</article>`;

/** A bar for each turn whose value is known (`agentrl rollout --values`): success of continuations before and after it, by index. */
export function worths(episode) {
  const turns = episode.turns ?? [];
  const values = [...turns.map((turn) => turn.value), episode.success === null || episode.success === undefined ? null : Number(episode.success)];
  const known = turns.map((turn, at) => ({ index: turn.index, before: values[at], after: values[at + 1] })).filter(({ before, after }) => typeof before === "number" && typeof after === "number");
  const most = Math.max(0, ...known.map(({ before, after }) => before - after));
  const percent = (share) => ({ width: `${100 * share}%` });
  return new Map(known.map(({ index, before, after }) => [index, html`<div class="worth small" data-worth=${index}>
    <div class="spans"><i class="engine" style=${percent(Math.min(before, after))} /><i class=${after < before ? "lost" : "won"} style=${percent(Math.abs(after - before))} /></div>
    <span>${fixed(before)} → ${fixed(after)}${before - after === most && most > 0 ? " here" : ""}</span></div>`]));
}

export function Turn({ turn, rewrites = [] }) {
  const { message } = turn;
  const facts = [
    typeof turn.tokens === "number" && `${number(turn.tokens)} tokens sampled after ${number(turn.prompt_tokens)}`,
    turn.seconds > 0 && seconds(turn.seconds),
    turn.finish && turn.finish !== "stop" && `finish: ${turn.finish}`,
    turn.version !== undefined && turn.version !== null && `weights v${turn.version}`,
    turn.reward !== null && turn.reward !== undefined && `reward ${number(turn.reward)}`,
    turn.usd > 0 && `$${turn.usd.toFixed(4)}`,
  ].filter(Boolean);
  return html`<article class="turn sampled" data-turn=${turn.index}>
    ${rewrites.map((one) => html`<div class="notice warn small"><div class="grow">Before this turn the conversation was rewritten: ledger ${one.ledger} begins, with ${number(one.tokens)} tokens.
      ${Array.isArray(one.added) && one.added.map((message) => html`<${Message} message=${message} />`)}</div></div>`)}
    <header><span class="role assistant">turn ${turn.index}</span><span>${facts.join(" · ")}</span></header>
    ${message?.reasoning && html`<div class="reasoning"><${Text} value=${message.reasoning} /></div>`}
    ${message?.content ? html`<${Text} value=${message.content} />` : !(message?.tool_calls ?? []).length && html`<span class="muted small">said nothing</span>`}
    ${calls(turn).map(({ call, result }) => html`${call && html`<${Call} call=${call} />`}${result ? html`<${Result} result=${result} />` : html`<p class="muted small">no answer: the episode ended before it</p>`}`)}
  </article>`;
}

/** Short calls and answers take one line. */
const short = (value) => value !== null && value !== undefined && (typeof value === "string" ? value.length < 90 && !value.includes("\n") : JSON.stringify(value).length < 90);

const Call = ({ call }) => html`<div class="call ${call.error ? "failed" : ""} ${!call.error && short(call.arguments) ? "line" : ""}">
  <header><span class="name">${pieces(call.name || "(no name)")}</span><span class="muted small">call</span>${call.error && html`<span class="badge bad">malformed</span>`}</header>
  ${call.error && html`<p class="bad small"><${Text} value=${call.error} lines=${4} /></p>`}
  ${call.arguments === null || call.arguments === undefined ? html`<${Text} value=${call.raw ?? ""} />` : html`<${Arguments} value=${call.arguments} />`}
</div>`;

const Result = ({ result }) => html`<div class="answer ${result.error ? "failed" : ""} ${short(result.content) ? "line" : ""}">
  <header><span class="name">${pieces(result.name ?? "")}</span><span class="muted small">answered${result.seconds > 0 ? ` in ${seconds(result.seconds)}` : ""}</span>${result.error && html`<span class="badge bad">${pieces(result.error)}</span>`}</header>
  <${Text} value=${result.content} />
  <${Pictures} of=${result} />
</div>`;
