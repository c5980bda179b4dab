// The tokens of a ledger as the model saw them, colored by one thing that is known of each. Read in blocks, as they come into view.
import { html, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./html.js";
import { address, get } from "./api.js";
import { css, legend, MODES, tint, useDark } from "./colors.js";
import { number } from "./format.js";
import { Failed } from "./parts.js";
import { pieces } from "./text.js";

const BLOCK = 1000; // tokens
const AHEAD = "1200px";
const LINE = 22; // px

/** One token's columns as an object. */
function tokenAt(columns, place) {
  const at = (name) => (columns[name] ? columns[name][place] ?? null : null);
  return { id: at("id"), text: at("text"), sampled: Boolean(at("sampled")), logprob: at("logprob"), advantage: at("advantage"), version: at("version"), ratio: at("ratio"), turn: at("turn") };
}

export function Ledger({ run, id, ledgers, query, onQuery }) {
  const which = Math.min(ledgers.length - 1, Math.max(0, Number(query.ledger) || 0));
  const mode = MODES.includes(query.color) ? query.color : "logprob";
  const total = ledgers[which]?.tokens ?? 0;
  const [known, setKnown] = useState({});
  const [error, setError] = useState(null);
  const [tip, setTip] = useState(null);
  const [typical, setTypical] = useState(LINE * (BLOCK / 18)); // px, of a block: a guess until one was drawn
  const isDark = useDark();
  const path = address("runs", run, "episodes", id, "tokens");
  const asked = useRef(new Set());
  useEffect(() => {
    asked.current = new Set();
    setKnown({});
    setError(null);
  }, [path, which]);
  const load = async (block) => {
    if (asked.current.has(block)) return;
    const mine = asked.current;
    mine.add(block);
    try {
      const columns = await get(path, { ledger: which, offset: block * BLOCK, limit: BLOCK });
      if (mine === asked.current) setKnown((old) => ({ ...old, [block]: columns }));
    } catch (fault) {
      mine.delete(block);
      if (mine === asked.current) setError(fault);
    }
  };
  const seen = useMemo(() => facts(Object.values(known)), [known]);
  const problem = Object.values(known).find((columns) => columns.text_problem)?.text_problem;
  const lost = Object.values(known).find((columns) => columns.trained_problem)?.trained_problem;
  const missing = Object.keys(known).length > 0 && (mode === "advantage" ? !seen.advantage : mode === "ratio" && !seen.ratio);
  if (!ledgers.length) return html`<p class="empty">No tokens were recorded: the episode was played by an API or by a program.</p>`;
  return html`<div class="stack" style=${{ gap: 0 }}>
    <div class="row tools">
      ${ledgers.length > 1 && html`<label>ledger <select value=${which} aria-label="ledger" onChange=${(event) => onQuery({ ledger: event.target.value === "0" ? "" : event.target.value })}>
        ${ledgers.map((one, place) => html`<option value=${place}>${place}: ${number(one.tokens)} tokens, ${number(one.sampled)} sampled</option>`)}</select></label>`}
      <span class="muted">color by</span>
      ${MODES.map((name) => html`<button key=${name} aria-pressed=${mode === name} onClick=${() => onQuery({ color: name })}>${name}</button>`)}
      <${Scale} mode=${mode} seen=${seen} theme=${isDark ? "dark" : "light"} />
      <span class="muted small">${number(total)} tokens, ${number(ledgers[which].sampled)} sampled</span>
    </div>
    ${missing && html`<div class="notice warn" style=${{ margin: "8px 12px" }}>The ${mode} of these tokens is not recorded: it is known of episodes that were trained on, in runs that keep it.${lost && html` Its row is damaged: ${pieces(lost)}`}</div>`}
    ${problem && html`<div class="notice" style=${{ margin: "8px 12px" }}><span>Numbers of tokens instead of their text: ${pieces(problem)}</span></div>`}
    ${error && html`<${Failed} error=${error} again=${() => setError(null)} />`}
    <div class="ledger" dir="ltr" onMouseOver=${(event) => setTip(hovered(event, known))} onMouseLeave=${() => setTip(null)}>
      ${Array.from({ length: Math.ceil(total / BLOCK) }, (_, block) => html`
        <${Block} key=${`${which} ${block}`} block=${block} columns=${known[block]} count=${Math.min(BLOCK, total - block * BLOCK)} load=${load} mode=${mode} seen=${seen} theme=${isDark ? "dark" : "light"} typical=${typical} onDrawn=${setTypical} />`)}
    </div>
    ${tip && html`<${Tip} ...${tip} />`}
  </div>`;
}

/** Ranges over the tokens that are known so far. */
function facts(blocks) {
  let most = 0;
  let advantage = false;
  let ratio = false;
  let turns = 0;
  const versions = new Set();
  for (const columns of blocks) {
    columns.text.forEach((_, place) => {
      const token = tokenAt(columns, place);
      if (token.turn !== null) turns = Math.max(turns, token.turn + 1);
      if (!token.sampled) return;
      versions.add(token.version);
      if (token.advantage !== null) {
        advantage = true;
        most = Math.max(most, Math.abs(token.advantage));
      }
      ratio ||= token.ratio !== null;
    });
  }
  const sorted = [...versions].sort((a, b) => a - b);
  return { most: most || 1, versions: sorted, first: sorted[0] ?? 0, turns, advantage, ratio };
}

/** A run of tokens; drawn only near the part of the page that is seen, and as high as it was while it is not. */
function Block({ block, columns, count, load, mode, seen, theme, typical, onDrawn }) {
  const box = useRef(null);
  const [near, setNear] = useState(false);
  const height = useRef(null); // px, as it was drawn
  useEffect(() => {
    const watch = new IntersectionObserver(([entry]) => {
      if (!entry.isIntersecting && box.current?.childElementCount) height.current = box.current.offsetHeight;
      setNear(entry.isIntersecting);
      if (entry.isIntersecting) load(block);
    }, { rootMargin: AHEAD });
    watch.observe(box.current);
    return () => watch.disconnect();
  }, []);
  const drawn = near && columns;
  const spans = useMemo(() => (drawn ? columns.text.map((_, place) => span(tokenAt(columns, place), place, mode, seen, theme)) : null), [drawn, columns, mode, theme, seen.most, seen.first]);
  // The first block tells how high the others will be, so that the page does not jump as they are drawn.
  useLayoutEffect(() => { if (drawn && block === 0) onDrawn(box.current.offsetHeight * (BLOCK / count)); }, [drawn]);
  return html`<div class="block" ref=${box} data-block=${block} style=${{ height: drawn ? "auto" : `${height.current ?? Math.max(LINE, typical * (count / BLOCK))}px` }}>${spans}</div>`;
}

function span(token, place, mode, seen, theme) {
  const color = css(tint(mode, token, seen, theme));
  return html`<span data-t=${place} class=${token.sampled ? "sampled" : "context"} style=${color ? { background: color, color: "var(--text)" } : undefined}>${visible(token)}</span>`;
}

const ODD = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufffd]/g;

/**
 * A token's text with its line breaks marked, and what cannot be seen spelled out; its number if its text is not known. A token
 * that is the beginning of a character has none: the character stands at the last of its tokens.
 */
function visible({ text, id }) {
  if (text === null) return `⟨${id}⟩`;
  if (text === "") return "·";
  return text.replace(ODD, (one) => (one < " " ? String.fromCharCode(0x2400 + one.codePointAt(0)) : one === "\ufffd" ? `⟨${id}⟩` : `U+${one.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}`)).replace(/\n/g, "↵\n");
}

function hovered(event, known) {
  const target = event.target.closest("[data-t]");
  const columns = target && known[target.parentElement.dataset.block];
  if (!columns) return null;
  const place = Number(target.dataset.t);
  const box = target.getClientRects()[0];
  return { token: tokenAt(columns, place), number: Number(target.parentElement.dataset.block) * BLOCK + place, x: box.left, y: box.bottom };
}

function Tip({ token, number: place, x, y }) {
  const rows = [
    ["text", token.text === null ? "unknown" : JSON.stringify(token.text)], ["id", token.id], ["token", place], ["turn", token.turn], ["", token.sampled ? "sampled" : "context"],
    ...(token.sampled ? [["logprob", `${number(token.logprob)}  (p ${number(Math.exp(token.logprob), 3)})`], ["version", token.version]] : []),
    ...(token.advantage !== null && token.sampled ? [["advantage", number(token.advantage)]] : []),
    ...(token.ratio !== null && token.sampled ? [["ratio", number(token.ratio)]] : []),
  ];
  const style = { left: `${Math.min(x, innerWidth - 300)}px`, ...(y > innerHeight - 200 ? { bottom: `${innerHeight - y + 28}px` } : { top: `${y + 6}px` }) };
  return html`<div class="tip" role="tooltip" style=${style}><dl>${rows.map(([name, value]) => html`<dt>${name}</dt><dd>${String(value)}</dd>`)}</dl></div>`;
}

function Scale({ mode, seen, theme }) {
  const steps = legend(mode, seen, theme);
  const graded = ["logprob", "advantage", "ratio"].includes(mode);
  if (graded) {
    return html`<span class="scale" aria-label=${`${mode}: legend`}><span>${steps[0].label}</span>
      ${steps.map(({ label, color }) => html`<span class="step" title=${label} style=${{ background: color }}></span>`)}<span style=${{ marginLeft: "8px" }}>${steps[steps.length - 1].label}</span></span>`;
  }
  return html`<span class="scale" aria-label=${`${mode}: legend`}>${steps.map(({ label, color }) => html`<span class="swatch" style=${{ background: color || "transparent" }}></span><span>${label}</span>`)}</span>`;
}
