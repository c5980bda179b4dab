// Small parts that several pages share.
import { html } from "./html.js";
import { fixed, NONE, number } from "./format.js";
import { Text, pieces } from "./text.js";

/** What is shown while nothing is there yet, when a request failed, or else `children(data)`. */
export function Answer({ of, children, what = "this" }) {
  const { data, error, loading, again } = of;
  return html`
    ${error && html`<${Failed} error=${error} again=${again} />`}
    ${!data && !error && html`<div class="empty" role="status">Loading ${what}…</div>`}
    ${data && html`<div class=${loading ? "loading" : ""} aria-busy=${loading}>${children(data)}</div>`}`;
}

export function Failed({ error, again }) {
  const advice = error.status === 0
    ? "Start it again in its terminal; this page goes on from where it is."
    : error.status === 404 ? "The run may have been moved or removed. The list of runs shows what is there." : "";
  return html`<div class="notice bad" role="alert">
    <div class="grow"><strong>${pieces(error.message)}</strong> <span>${advice}</span></div>
    ${again && html`<button onClick=${again}>Try again</button>`}
    <a href="#/">All runs</a>
  </div>`;
}

export const Empty = ({ title, children }) => html`<div class="empty"><strong>${title}</strong>${children}</div>`;

export function Panel({ title, aside, children, scroll = false, tall = false, id }) {
  return html`<section class="panel" id=${id}>
    ${title && html`<header><h2>${title}</h2><div class="row grow" style=${{ justifyContent: "flex-end" }}>${aside}</div></header>`}
    <div class="${scroll ? "scroll" : "body"} ${tall ? "tall" : ""}">${children}</div>
  </section>`;
}

const STATUS = { done: "good", running: "info", failed: "bad", error: "bad", interrupted: "warn", stopped: "warn" };

export const Status = ({ run }) => (run.live
  ? html`<span class="live"><span class="dot pulse"></span>live</span>`
  : html`<span class="badge ${STATUS[run.status] ?? ""}">${run.status ?? "unknown"}</span>`);

/** A share as a figure and a bar of its length. */
export const Share = ({ value }) => html`${fixed(value)}${typeof value === "number" && html`<span class="share" aria-hidden="true"><i style=${{ width: `${100 * Math.min(1, Math.max(0, value))}%` }}></i></span>`}`;

/** Whether an episode solved its task, in a word and a color. */
export function Outcome({ episode }) {
  if (typeof episode.success !== "boolean") return typeof episode.reward === "number" ? html`<span class="muted">${NONE}</span>` : html`<span class="badge">unscored</span>`;
  return episode.success ? html`<span class="badge good">solved</span>` : html`<span class="badge bad">not solved</span>`;
}

export const outcomeClass = ({ reward, success }) => (reward === undefined ? "" : success === true ? "solved" : success === false ? "failed" : reward === null ? "unscored" : "");

export function Stop({ stop }) {
  const fault = ["env_error", "engine_error", "agent_error", "tool_timeout", "episode_timeout", "engine_timeout", "cancelled", "agent_failed"].includes(stop);
  return html`<span class="badge ${fault ? "bad" : stop === "done" ? "" : "warn"}">${stop ?? NONE}</span>`;
}

/** Links to the members of a group, each with its reward: ? if it has none, … if it is not known yet. */
export function Members({ members, link, current }) {
  return html`<div class="members">${members.map((member) => html`
    <a key=${member.id} class="member ${outcomeClass(member)} ${member.id === current ? "current" : ""}" href=${link(member.id)}
      aria-current=${member.id === current ? "true" : undefined}
      title=${`${member.stop ?? ""}${member.turns === undefined || member.turns === null ? "" : `, ${member.turns} turns`}`}>${member.reward === undefined ? "…" : member.reward === null ? "?" : number(member.reward, 3)}</a>`)}</div>`;
}

/** A table's heading that sorts by its column. */
export function SortHead({ name, title = name, sort, order, onSort, numeric, hint }) {
  const active = sort === name;
  return html`<th class=${numeric ? "number" : ""} aria-sort=${active ? (order === "asc" ? "ascending" : "descending") : undefined} title=${hint}>
    <button onClick=${() => onSort(name, active && order === "desc" ? "asc" : "desc")}>${title}</button></th>`;
}

export const Facts = ({ facts }) => html`<dl class="facts">${facts.filter(Boolean).map(([name, value, hint]) => html`
  <div title=${hint}><dt>${name}</dt><dd>${value}</dd></div>`)}</dl>`;

export const Cause = ({ text }) => (text ? html`<div class="notice bad"><${Text} value=${text} lines=${8} /></div>` : null);
