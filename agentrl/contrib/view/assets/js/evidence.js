// Why an episode has its reward: the evidence tree, each node with its value, its parts, and what was expected against what was found.
import { html } from "./html.js";
import { number } from "./format.js";
import { Json, pieces } from "./text.js";

const HEAD = new Set(["node", "at", "value", "id", "weight", "evidence", "skipped", "unscored"]);
const BELOW = ["of", "if", "then", "else", "parts", "root"];
const EXPECTED = /^(expect|expected|gold|want|wanted|missing|pattern|schema)/;

const isNode = (item) => item !== null && typeof item === "object" && !Array.isArray(item) && typeof item.node === "string";

/** pass, fail, part (in between), null (could not be scored), skip. */
export function verdict(node) {
  if (node.skipped !== undefined) return "skip";
  if (typeof node.value !== "number") return "null";
  return node.value >= 1 - 1e-9 ? "pass" : node.value <= 1e-9 ? "fail" : "part";
}

const MARKS = { pass: ["✓", "good", "passed"], fail: ["✗", "bad", "failed"], part: ["◐", "warn", "in part"], null: ["?", "warn", "could not be scored"], skip: ["·", "muted", "skipped"] };

export function Evidence({ evidence }) {
  if (evidence === null || evidence === undefined) return html`<p class="muted">No evidence was recorded.</p>`;
  if (typeof evidence !== "object") return html`<${Json} value=${evidence} />`;
  const { spec, root, success, metrics, unscored } = evidence;
  if (!isNode(root)) return html`${unscored && html`<p class="warn">${pieces(String(unscored))}</p>`}<${Json} value=${evidence} />`;
  return html`<div class="tree">
    ${unscored && html`<p class="warn">${pieces(String(unscored))}</p>`}
    <${Node} node=${root} />
    ${success && html`<p class="small muted" style=${{ marginTop: "6px" }}>success: <strong class=${success.value ? "good" : "bad"}>${success.value === null ? "could not be scored" : success.value ? "yes" : "no"}</strong>, by ${pieces(String(success.by ?? "the spec"))}${spec ? html` of ${pieces(String(spec))}` : ""}</p>
      ${isNode(success.node) && html`<details class="parts"><summary class="muted small">how success was decided</summary><${Node} node=${success.node} /></details>`}`}
    ${(metrics ?? []).length > 0 && html`<h3 style=${{ marginTop: "8px" }}>measured, not rewarded</h3>${metrics.filter(isNode).map((node) => html`<${Node} node=${node} />`)}`}
  </div>`;
}

function Node({ node, role }) {
  const [mark, color, word] = MARKS[verdict(node)];
  const below = BELOW.flatMap((key) => {
    const found = node[key];
    if (Array.isArray(found)) return found.filter(isNode).map((child, place) => [key === "parts" ? `part ${place}` : "", child]);
    return isNode(found) ? [[key, found]] : [];
  });
  return html`<div>
    <div class="node" title=${node.at} data-node=${node.id ?? node.node} data-verdict=${verdict(node)}>
      <span class="mark ${color}" aria-label=${word}>${mark}</span>
      <span>${role && html`<span class="muted">${role} </span>`}<strong>${pieces(node.id ?? node.node)}</strong>${node.id && html` <span class="muted">${pieces(node.node)}</span>`}${node.weight !== undefined && html` <span class="muted">× ${number(node.weight)}</span>`}</span>
      <span class="value ${color}">${node.skipped !== undefined ? `skipped: ${String(node.skipped)}` : number(node.value)}</span>
    </div>
    <${What} node=${node} />
    ${below.length > 0 && html`<${Below} nodes=${below} />`}
  </div>`;
}

/** The nodes below one. Many parts that all passed are folded: what is wrong stands out. */
function Below({ nodes }) {
  const list = html`<ul>${nodes.map(([name, child], place) => html`<li key=${place}><${Node} node=${child} role=${name} /></li>`)}</ul>`;
  const parts = nodes[0][0].startsWith("part ");
  const passed = nodes.filter(([, child]) => verdict(child) === "pass").length;
  if (!parts || nodes.length < 2) return list;
  return html`<details class="parts" open=${passed < nodes.length}><summary class="muted small">${nodes.length} parts, ${passed === nodes.length ? "all" : passed} passed</summary>${list}</details>`;
}

/** What a node says about itself, what was expected first. */
function What({ node }) {
  const own = Object.entries(node).filter(([key, value]) => !HEAD.has(key) && !BELOW.includes(key) && value !== undefined);
  const detail = node.evidence;
  const found = detail !== null && typeof detail === "object" && !Array.isArray(detail) ? Object.entries(detail) : detail === null || detail === undefined ? [] : [["found", detail]];
  const all = [...(node.unscored === undefined ? [] : [["unscored", node.unscored]]), ...found, ...own];
  const told = all.filter(([, value]) => !(Array.isArray(value) && !value.length)); // an empty list says nothing
  if (!told.length) return null;
  const rows = [...told.filter(([key]) => EXPECTED.test(key)), ...told.filter(([key]) => !EXPECTED.test(key))];
  return html`<dl class="against what">${rows.map(([key, value]) => html`<dt>${pieces(key)}</dt><dd><${Json} value=${value} lines=${8} characters=${400} /></dd>`)}</dl>`;
}
