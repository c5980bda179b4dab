// Text that a run wrote. It is shown, never interpreted: no markup, no escape sequences, no change of direction.
import { html, useMemo, useState } from "./html.js";
import { number } from "./format.js";

// Control characters (but not tab and newline), and characters that are invisible or turn the direction of what follows.
const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]|[\u{e0000}-\u{e007f}]/gu;

/** How an odd character is spelled: control pictures for those of ASCII (␛), else its number. */
function spelled(character) {
  const code = character.codePointAt(0);
  if (code < 0x20) return String.fromCharCode(0x2400 + code);
  return `U+${code.toString(16).toUpperCase().padStart(4, "0")}`;
}

/** Pieces of a text for the screen: strings, and elements in place of odd characters. */
export function pieces(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(ODD)) {
    if (match.index > from) found.push(text.slice(from, match.index));
    const code = `U+${match[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`;
    found.push(html`<span class="odd" title=${code}>${spelled(match[0])}</span>`);
    from = match.index + match[0].length;
  }
  if (from < text.length) found.push(text.slice(from));
  return found;
}

const MORE = 20000;

/** Where a text is cut: after `characters` characters or `lines` lines, whichever comes first. */
export function cut(text, characters, lines) {
  let end = -1;
  for (let count = 0; count < lines; count += 1) {
    end = text.indexOf("\n", end + 1);
    if (end < 0 || end > characters) break;
  }
  const at = end < 0 ? characters : Math.min(end, characters);
  // Not between the two halves of one character.
  return at < text.length && /[\ud800-\udbff]/.test(text[at - 1] ?? "") ? at + 1 : at;
}

/** Any text of a run, folded if it is long. */
export function Text({ value, characters = 2400, lines = 36 }) {
  const text = String(value ?? "");
  const [shown, setShown] = useState(0); // characters beyond the fold
  const first = cut(text, characters, lines);
  const end = Math.min(text.length, first + shown);
  const left = text.length - end;
  return html`<div class="text" dir="auto">${pieces(text.slice(0, end))}</div>
    ${(left > 0 || shown > 0) && html`<div class="fold row">
      ${left > 0 && html`<button class="link" onClick=${() => setShown(shown + MORE)}>
        show ${number(Math.min(left, MORE))} more of ${number(left)} characters
      </button>`}
      ${shown > 0 && html`<button class="link" onClick=${() => setShown(0)}>fold</button>`}
    </div>`}`;
}

const TOKEN = /("(?:\\.|[^"\\])*")(\s*:)?|(-?\d[\d.eE+-]*)|\b(true|false|null)\b/g;
const HIGHLIGHT = 20000; // characters; beyond, one color: a person does not read them

const WIDTH = 56;

/** A value as JSON: a list or an object on one line if it fits there, else a line for each of its members. */
export function pretty(value, indent = "") {
  const line = JSON.stringify(value) ?? "undefined";
  if (value === null || typeof value !== "object") return line;
  const spaced = line.length > 2 * WIDTH ? line : oneLine(value);
  if (spaced.length + indent.length <= WIDTH) return spaced;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = `${indent}  `;
  const members = Array.isArray(value)
    ? value.map((item) => inner + pretty(item, inner))
    : Object.entries(value).map(([name, item]) => `${inner}${JSON.stringify(name)}: ${pretty(item, inner)}`);
  return members.length ? `${open}\n${members.join(",\n")}\n${indent}${close}` : line;
}

function oneLine(value) {
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  if (Array.isArray(value)) return `[${value.map(oneLine).join(", ")}]`;
  return `{${Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${oneLine(item)}`).join(", ")}}`;
}

/** A JSON value, indented, its names and values told apart by color. */
export function Json({ value, characters = 1600, lines = 30 }) {
  const text = useMemo(() => pretty(value), [value]);
  const [whole, setWhole] = useState(false);
  const end = whole ? text.length : cut(text, characters, lines);
  if (whole && text.length > HIGHLIGHT) return html`<${Text} value=${text} />`;
  return html`<div class="json">${colored(text.slice(0, end))}</div>
    ${text.length > cut(text, characters, lines) && html`<button class="link fold" onClick=${() => setWhole(!whole)}>
      ${whole ? "fold" : `show all ${number(text.length)} characters`}
    </button>`}`;
}

function colored(text) {
  const found = [];
  let from = 0;
  for (const match of text.matchAll(TOKEN)) {
    if (match.index > from) found.push(text.slice(from, match.index));
    const [all, string, colon, figure] = match;
    const kind = string ? (colon ? "k" : "s") : figure ? "n" : "w";
    found.push(html`<span class=${kind}>${pieces(all)}</span>`);
    from = match.index + all.length;
  }
  if (from < text.length) found.push(...pieces(text.slice(from)));
  return found;
}

/** The arguments of a call: one row a name; text as text, with its line breaks, all else as JSON. */
export function Arguments({ value }) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) return html`<${Json} value=${value} />`;
  const names = Object.keys(value);
  if (!names.length) return html`<span class="muted small">no arguments</span>`;
  return html`<dl class="args">${names.map((name) => html`
    <dt>${pieces(name)}</dt>
    <dd>${typeof value[name] === "string" && /\n/.test(value[name])
      ? html`<${Text} value=${value[name]} />`
      : html`<${Json} value=${value[name]} />`}</dd>`)}</dl>`;
}
