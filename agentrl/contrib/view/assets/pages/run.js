// One run: what it came to, its curves, its steps, its config.
import { html } from "../js/html.js";
import { address, useApi } from "../js/api.js";
import { runColors } from "../js/colors.js";
import { Curves } from "../js/curves.js";
import { called, compact, fixed, number, plural, seconds, when } from "../js/format.js";
import { useMetrics } from "../js/metrics.js";
import { Answer, Cause, Empty, Facts, Failed, Panel, Share } from "../js/parts.js";
import { go, href } from "../js/router.js";
import { StepsTable } from "../js/steps.js";
import { pieces, Text } from "../js/text.js";

const PHASES = { before: "held-out tasks before training", after: "held-out tasks after training", eval: "held-out tasks in between", train: "training" };

export function OverviewPage({ run, query, runs }) {
  const { rows, error } = useMetrics([run]);
  const color = runColors(runs.length ? runs : [run]).get(run.run);
  const change = (patch) => go(["run", run.run], { ...query, ...patch }, true);
  const { summary } = run;
  return html`<main class="stack">
    <div class="row apart"><h1>${pieces(run.name)}</h1><code class="muted" title=${run.path}>${pieces((run.path ?? "").split("/").slice(-2).join("/"))}</code></div>
    <${Cause} text=${summary?.error} />
    <section class="panel"><div class="body"><${Facts} facts=${[
      ["held-out success", html`${fixed(run.success_before)} <span class="muted">→</span> ${fixed(run.success_after)}`, "success on held-out tasks before and after training"],
      ["updates", run.steps ? `${number(run.updates)} of ${number(run.steps)}` : number(run.updates)],
      ["sampled tokens", compact(run.tokens)],
      ["time", seconds(run.seconds ?? (run.live && typeof run.started === "number" ? Date.now() / 1000 - run.started : null))],
      ["started", when(run.started)],
      ["status", run.live ? "live" : run.status ?? "unknown"],
      summary?.engine && ["engine", summary.engine],
      summary?.seed !== undefined && ["seed", number(summary.seed)],
      summary?.restarts > 0 && ["restarts", number(summary.restarts)],
    ]} /></div></section>
    ${error && html`<${Failed} error=${error} />`}
    ${run.status !== "eval" && html`<${Curves} runs=${[{ run: run.run, label: run.name, color }]} rowsOf=${{ [run.run]: rows[run.run] ?? null }} query=${query} onQuery=${change} table=${run.metric_table ?? []} />`}
    <${Evaluations} run=${run} />
    <div class="sides top">
      <div class="stack"><${Environments} summary=${summary} run=${run} /><${Reasons} run=${run} /></div>
      <div class="stack"><${Phases} run=${run} /><${Signs} run=${run} /></div>
    </div>
  </main>`;
}

function Environments({ summary, run }) {
  // A run of one environment has its numbers itself.
  const { success_before: before, success_after: after, tokens } = run;
  const found = Object.entries(summary?.envs ?? Object.fromEntries((run.envs ?? []).map((name) => [name, run.envs.length === 1 ? { success_before: before, success_after: after, tokens, best: summary?.best } : {}])));
  return html`<${Panel} title="Environments" scroll>
    ${found.length > 0 && html`<table><thead><tr><th>environment</th><th class="number">before</th><th class="number">after</th><th class="number">best</th><th class="number">tokens</th></tr></thead>
      <tbody>${found.map(([name, of]) => html`<tr key=${name}>
        <td><a href=${href(["run", run.run, "episodes"], { env: name })}>${pieces(name)}</a></td>
        <td class="number">${fixed(of.success_before)}</td><td class="number"><${Share} value=${of.success_after} /></td>
        <td class="number">${of.best ? `${fixed(of.best.success)} at ${number(of.best.step)}` : "–"}</td><td class="number">${compact(of.tokens)}</td>
      </tr>`)}</tbody></table>`}
  <//>`;
}

/** Held-out tasks with pass@k, pass^k and 95 % intervals, and a benchmark's own table. */
function Evaluations({ run }) {
  const found = run.evaluations ?? [];
  const names = [...new Set(found.flatMap(({ rates }) => Object.keys(rates)))].filter((name) => name !== "pass^1");
  const rate = (of) => (of ? html`${fixed(of.mean, 3)} <span class="muted">${fixed(of.low, 3)} to ${fixed(of.high, 3)}</span>` : "–");
  return html`${found.length > 0 && html`<${Panel} title="Held-out tasks, with 95 % intervals" scroll><div class="scroll" style=${{ maxHeight: "300px" }}><table class="evaluations">
      <thead><tr><th>phase</th><th class="number">step</th><th>environment</th><th class="number">tasks</th><th class="number">episodes</th><th class="number">unscored</th>${names.map((name) => html`<th key=${name}>${name}</th>`)}</tr></thead>
      <tbody>${found.map((one) => html`<tr key=${one.file + one.env}><td>${one.phase}</td><td class="number">${number(one.step)}</td><td>${pieces(one.env)}</td>
        <td class="number">${number(one.tasks)}</td><td class="number">${number(one.episodes)}</td><td class="number">${number(one.unscored)}</td>
        ${names.map((name) => html`<td key=${name} class="nowrap">${rate(one.rates[name])}</td>`)}</tr>`)}</tbody></table></div><//>`}
    ${Object.entries(run.official ?? {}).map(([suite, of]) => html`<${Panel} key=${suite} title=${pieces(`${suite} ${of.version}: its own metrics`)} scroll
      aside=${html`<span class="muted">${number(of.tasks)} of its ${number(of.of)} tasks (${pieces(String(of.split))})${of.tasks < of.of ? "; only a part, so not a result of the benchmark" : ""}</span>`}><table class="official">
      <thead><tr><th></th><th class="number">value</th><th class="number">n</th><th class="number">weight</th><th></th></tr></thead>
      <tbody>${(of.rows ?? []).map((row) => html`<tr key=${row.name}><td>${pieces(row.name)}</td><td class="number">${fixed(row.value, 4)}</td><td class="number">${number(row.n)}</td>
        <td class="number">${row.weight === null ? "" : fixed(row.weight, 2)}</td><td class="muted">${pieces(row.note ?? "")}</td></tr>`)}</tbody></table><//>`)}`;
}

function Phases({ run }) {
  const steps = run.files;
  return html`<${Panel} title="Recorded episodes" scroll>
    ${steps.length ? html`<div class="scroll" style=${{ maxHeight: "300px" }}><table><thead><tr><th>phase</th><th class="number">step</th><th class="number">episodes</th><th></th></tr></thead>
      <tbody>${steps.map(({ file, phase, step, episodes, damaged, problem }) => html`<tr key=${file}>
        <td title=${PHASES[phase]}>${phase}</td><td class="number">${number(step)}</td>
        <td class="number"><a href=${href(["run", run.run, "episodes"], { phase, step })}>${number(episodes)}</a></td>
        <td>${phase === "train" && html`<a href=${href(["run", run.run, "groups"], { step })}>groups</a>`}
          ${damaged > 0 && html`<span class="bad small">${plural(damaged, "damaged row")}, left out: ${pieces(problem ?? "")}</span>`}</td>
      </tr>`)}</tbody></table></div>`
    : html`<${Empty} title="No episodes are recorded yet">They are written after an evaluation, and every <code>trajectories_every</code> updates.<//>`}
  <//>`;
}

function Reasons({ run }) {
  const failures = useApi(address("runs", run.run, "failures"), {}, run.grows ? 5000 : 0);
  return html`<${Panel} title="Most frequent failures" aside=${html`<a href=${href(["run", run.run, "failures"])}>all</a>`} scroll>
    <${Answer} of=${failures} what="failures">${(data) => (data.length || run.reading
      ? html`<table><tbody>${data.slice(0, 6).map(({ reason, kind, episodes, examples }) => html`<tr key=${kind + reason}>
          <td class="number">${number(episodes)}</td><td><span class="badge">${kind}</span></td>
          <td><${Text} value=${reason} lines=${3} characters=${200} /></td>
          <td class="nowrap">${examples.length > 0 && html`<a href=${href(["run", run.run, "episode", String(examples[0])])}>${called(examples[0])}</a>`}</td></tr>`)}</tbody></table>`
      : html`<${Empty} title="No failures">Every recorded episode that was scored succeeded.<//>`)}<//>
  <//>`;
}

function Signs({ run }) {
  const suspects = useApi(address("runs", run.run, "suspects"), {}, run.grows ? 10000 : 0);
  return html`<${Panel} title="Suspects" aside=${html`<a href=${href(["run", run.run, "suspects"])}>all</a>`} scroll>
    <${Answer} of=${suspects} what="suspects">${(data) => (data.length || run.reading
      ? html`<table><tbody>${data.map(({ kind, title, why, episodes }, place) => html`<tr key=${place}>
          <td><a href=${href(["run", run.run, "suspects"])}>${title}</a><div class="muted small">${pieces(String(why))}</div></td>
          <td class="nowrap">${episodes.length > 0 && html`<a href=${href(["run", run.run, "episode", String(episodes[0].id)])}>${called(episodes[0].id)}</a>`}</td></tr>`)}</tbody></table>`
      : html`<${Empty} title="No suspects">No sign of a reward that is earned another way than meant.<//>`)}<//>
  <//>`;
}

export function StepsPage({ run, query }) {
  const { rows, error } = useMetrics([run]);
  const change = (patch) => go(["run", run.run, "steps"], { ...query, ...patch }, true);
  return html`<main class="stack">${error && html`<${Failed} error=${error} />`}
    <${StepsTable} sources=${[{ run: run.run, label: run.name, rows: rows[run.run] }]} query=${query} onQuery=${change} table=${run.metric_table ?? []} /></main>`;
}

export function ConfigPage({ run }) {
  return html`<main class="stack">
    <${Panel} title="Config, as resolved">${run.config ? html`<${Text} value=${run.config} characters=${40000} lines=${1200} />` : html`<${Empty} title="This run has no config.toml" />`}<//>
    <${Panel} title="Summary">${run.summary ? html`<${Text} value=${JSON.stringify(run.summary, null, 2)} lines=${200} characters=${20000} />` : html`<${Empty} title="Not written yet">It is written when the run ends.<//>`}<//>
    ${(run.metric_table ?? []).length > 0 && html`<${Panel} title="What the metrics mean" scroll tall><table>
      <thead><tr><th>metric</th><th>unit</th><th>meaning</th></tr></thead>
      <tbody>${run.metric_table.map(({ name, unit, meaning }) => html`<tr key=${name}><td><code>${name}</code></td><td>${unit}</td><td>${meaning}</td></tr>`)}</tbody></table><//>`}
  </main>`;
}
