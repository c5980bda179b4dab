// The frame around the pages: where one is, the tabs of a run, the theme, help; and which page an address is.
import { html, render, useEffect, useErrorBoundary, useRef, useState } from "./js/html.js";
import { address, useApi } from "./js/api.js";
import { setTheme, storedTheme, THEMES } from "./js/colors.js";
import { number } from "./js/format.js";
import { HELP, useKeys } from "./js/keys.js";
import { Empty, Failed, Status } from "./js/parts.js";
import { go, href, useRoute } from "./js/router.js";
import { pieces } from "./js/text.js";
import { ComparePage } from "./pages/compare.js";
import { EpisodePage } from "./pages/episode.js";
import { EpisodesPage } from "./pages/episodes.js";
import { FailuresPage } from "./pages/failures.js";
import { GroupsPage } from "./pages/groups.js";
import { ConfigPage, OverviewPage, StepsPage } from "./pages/run.js";
import { RunsPage } from "./pages/runs.js";
import { SuspectsPage } from "./pages/suspects.js";

const TABS = [
  ["", "Overview", OverviewPage],
  ["episodes", "Episodes", EpisodesPage],
  ["groups", "Groups", GroupsPage],
  ["failures", "Failures", FailuresPage],
  ["suspects", "Suspects", SuspectsPage],
  ["steps", "Steps", StepsPage],
  ["config", "Config", ConfigPage],
];
const RUNS_EVERY = 3000; // ms between two looks at the list of runs

function App() {
  const route = useRoute();
  const runs = useApi("api/runs", {}, RUNS_EVERY);
  const [help, setHelp] = useState(false);
  const [theme, setChosen] = useState(storedTheme);
  const [root, name] = route.path;
  const cycle = () => {
    const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
    setTheme(next);
    setChosen(next);
  };
  useKeys({
    "?": () => setHelp(true),
    t: cycle,
    u: () => go(...up(route)),
    "/": () => document.querySelector("[data-search]")?.focus(),
  });
  useEffect(() => {
    document.title = [name ?? (root === "compare" ? "compare" : "runs"), "agentrl"].join(" · ");
  }, [root, name]);
  const run = root === "run" ? runs.data?.find((one) => one.run === name) : undefined;
  return html`
    <div class="bar">
      <a class="brand" href="#/">agent<span>rl</span></a>
      <nav class="crumbs" aria-label="where this is">
        <a href="#/">Runs</a>
        ${root === "run" && html`<span>/</span><a href=${href(["run", name])}>${pieces(run?.name ?? name)}</a>`}
        ${root === "compare" && html`<span>/</span><span>Compare</span>`}
      </nav>
      ${run && html`<${Status} run=${run} />`}
      <div class="right">
        <a href=${href(["compare"], root === "run" ? { a: name } : {})}>Compare</a>
        <button class="quiet" onClick=${cycle} title="theme (t)" aria-label=${`theme: ${theme}`}>${{ auto: "◐", light: "☀", dark: "☾" }[theme]} ${theme}</button>
        <button class="quiet" onClick=${() => setHelp(true)} title="keys (?)" aria-label="help">?</button>
      </div>
    </div>
    ${root === "run" && html`<nav class="tabs" aria-label="parts of the run">${TABS.map(([part, title]) => {
      const current = (route.path[2] ?? "") === part || (part === "episodes" && route.path[2] === "episode");
      return html`<a key=${part} href=${href(["run", name, ...(part ? [part] : [])])} aria-current=${current ? "page" : undefined}>${title}</a>`;
    })}</nav>`}
    <${Guarded} key=${route.path.slice(0, 3).join("/")}><${Page} route=${route} runs=${runs} run=${run} /><//>
    ${help && html`<${Help} onClose=${() => setHelp(false)} />`}`;
}

/** The view above one: of an episode the list that it was found in, of a run all runs. */
function up({ path, query }) {
  if (path[0] === "run" && path[2] === "episode") return [["run", path[1], "episodes"], Object.fromEntries(new URLSearchParams(query.list ?? ""))];
  if (path[0] === "run" && path.length > 2) return [["run", path[1]]];
  return [[]];
}

function Page({ route, runs, run }) {
  const [root, name, part = ""] = route.path;
  if (root === undefined) return html`<${RunsPage} runs=${runs} query=${route.query} />`;
  if (root === "compare") return html`<${ComparePage} runs=${runs.data ?? []} query=${route.query} />`;
  if (root === "run" && name !== undefined) return html`<${RunPage} key=${name} name=${name} run=${run} part=${part} route=${route} runs=${runs} />`;
  return html`<main><${Empty} title="There is no such page"><a href="#/">All runs</a><//></main>`;
}

function RunPage({ name, run, part, route, runs }) {
  // Looked at again for as long as the run goes on or its episodes are being read: its steps and figures grow.
  const [reading, setReading] = useState(false);
  const grows = run?.live || reading;
  const detail = useApi(address("runs", name), {}, grows ? RUNS_EVERY : 0);
  const behind = detail.data !== null && detail.data.indexed < detail.data.of;
  useEffect(() => setReading(behind), [behind]);
  if (detail.error && !detail.data) return html`<main><${Failed} error=${detail.error} again=${detail.again} /></main>`;
  if (!detail.data) return html`<main><div class="empty" role="status">Loading the run…</div></main>`;
  // `steps` is the list of recorded ones there, and in the list of runs how many updates are planned.
  const found = { ...detail.data, ...run, files: detail.data.steps, steps: run?.steps ?? null, grows, reading: behind };
  const options = { run: found, query: route.query, runs: runs.data ?? [] };
  if (part === "episode") return html`<${EpisodePage} key=${name} ...${options} id=${route.path[3]} />`;
  const page = TABS.find(([known]) => known === part);
  if (!page) return html`<main><${Empty} title="There is no such page"><a href=${href(["run", name])}>The run's overview</a><//></main>`;
  return html`${behind && html`<div class="notice" role="status" style=${{ margin: "12px 20px 0" }}>Reading episodes: ${number(found.indexed)} of about ${number(found.of)}. Counts grow meanwhile.</div>`}
    <${page[2]} ...${options} />`;
}

/** A fault of the page itself is said, and leaves the frame usable. */
function Guarded({ children }) {
  const [error, reset] = useErrorBoundary((fault) => console.error(fault));
  if (error) return html`<main><${Failed} error=${{ message: `This page failed: ${error.message}`, status: -1 }} again=${reset} /></main>`;
  return children;
}

function Help({ onClose }) {
  const box = useRef(null);
  useEffect(() => {
    const opened = box.current;
    opened.showModal();
    return () => opened.close();
  }, []);
  return html`<dialog ref=${box} onClose=${onClose} aria-label="keys" onClick=${(event) => event.target === box.current && onClose()}>
    <div class="row apart"><h1>Keys</h1><button class="quiet" onClick=${onClose} aria-label="close">×</button></div>
    <dl class="keys">${HELP.map(([keys, what]) => html`<dt>${keys.split(" ").map((word) => (["/", "…", "and"].includes(word) && keys !== "/" ? html` ${word} ` : html` <kbd>${word}</kbd>`))}</dt><dd>${what}</dd>`)}</dl>
  </dialog>`;
}

render(html`<${App} />`, document.getElementById("app"));
