// Episodes to look at: signs of a reward that is earned another way than meant.
import { html } from "../js/html.js";
import { address, useApi } from "../js/api.js";
import { called, fixed, number, plural } from "../js/format.js";
import { Answer, Empty, Panel } from "../js/parts.js";
import { href } from "../js/router.js";
import { pieces } from "../js/text.js";

const LOOK = {
  gold_far: "Read what the episode did against its gold: a reward without the gold's result is earned another way.",
  repeated_text: "Read the turns: text that repeats itself may be filler that a term counts.",
  judge_disagreement: "Read the judge's reason beside the other terms of the evidence tree.",
  length_growth: "Compare an early and a late episode of one task: more tokens for the same reward are padding.",
};

export function SuspectsPage({ run }) {
  const suspects = useApi(address("runs", run.run, "suspects"), {}, run.grows ? 10000 : 0);
  return html`<main class="stack">
    <p class="muted">Signs, not proofs: reward hacking is found by looking, and these are the places to look at first.</p>
    <${Answer} of=${suspects} what="suspects">${(data) => (data.length
      ? html`<div class="stack">${data.map((one, place) => html`<${Suspect} key=${`${one.kind} ${place}`} run=${run} of=${one} />`)}</div>`
      : html`<section class="panel"><${Empty} title="No suspects">No high reward far from its gold, no repeated text, no judge apart from the other terms, no growth in length.<//></section>`)}<//>
  </main>`;
}

const Suspect = ({ run, of: { kind, title, why, value, episodes } }) => html`
  <${Panel} title=${title} aside=${html`${typeof value === "number" && html`<span class="badge warn">${kind === "length_growth" ? `× ${fixed(value)}` : plural(value, "episode")}</span>`}<span class="muted">${kind === "length_growth" ? "the longest" : "the worst"} ${number(episodes.length)}</span>`} scroll id=${kind}>
    <div style=${{ padding: "10px 12px" }}><p>${pieces(String(why))}</p><p class="muted">${LOOK[kind] ?? ""}</p></div>
    ${episodes.length > 0 && html`<div class="scroll" style=${{ maxHeight: "260px" }}><table><thead><tr><th>episode</th><th>why</th></tr></thead><tbody>${episodes.map((one) => html`<tr key=${one.id}>
      <td class="nowrap"><a href=${href(["run", run.run, "episode", String(one.id)])}>${called(one.id)}</a></td>
      <td>${pieces(String(one.why))}</td></tr>`)}</tbody></table></div>`}
  <//>`;
