// Colors of runs, and of tokens by what is known of each.
import { useEffect, useState } from "./html.js";

export const RUN_COLORS = 8;

/** A run's color: by its place among all runs, oldest first, so that it stays when newer ones begin. */
export function runColors(runs) {
  const order = [...runs].sort((a, b) => String(a.started ?? "").localeCompare(String(b.started ?? ""), "en", { numeric: true })
    || String(a.run).localeCompare(String(b.run)));
  return new Map(order.map(({ run }, place) => [run, `var(--run-${place % RUN_COLORS})`]));
}

/** The value of a color like `var(--run-3)` as the browser computes it now, for canvases. */
export function computed(color) {
  const probe = document.createElement("i");
  probe.style.color = color;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  return found;
}

const dark = matchMedia("(prefers-color-scheme: dark)");
export const THEMES = ["auto", "light", "dark"];

export function setTheme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  try {
    localStorage.setItem("agentrl.theme", name);
  } catch {
    // Storage may be refused: the choice then lasts as long as the page.
  }
  dispatchEvent(new Event("agentrl-theme"));
}

export function storedTheme() {
  try {
    const name = localStorage.getItem("agentrl.theme");
    return THEMES.includes(name) ? name : "auto";
  } catch {
    return "auto";
  }
}

const isDark = () => (document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light")) === "dark";

/** Whether the page is dark now; the caller is drawn again when that changes. */
export function useDark() {
  const [value, setValue] = useState(isDark);
  useEffect(() => {
    const follow = () => setValue(isDark());
    dark.addEventListener("change", follow);
    addEventListener("agentrl-theme", follow);
    return () => {
      dark.removeEventListener("change", follow);
      removeEventListener("agentrl-theme", follow);
    };
  }, []);
  return value;
}

// Grounds and inks of the two themes, as [r, g, b]. Inks are chosen so that the page's text stays readable on each (4.5:1).
const PALETTE = {
  light: { ground: [255, 255, 255], warm: [240, 140, 46], up: [74, 144, 226], down: [235, 110, 95], kinds: [[120, 170, 240], [245, 180, 110], [110, 205, 180], [235, 150, 200], [180, 205, 100], [190, 165, 240], [215, 175, 140], [175, 185, 200]] },
  dark: { ground: [26, 29, 33], warm: [158, 84, 12], up: [34, 92, 168], down: [158, 48, 40], kinds: [[40, 80, 150], [140, 80, 20], [18, 105, 90], [130, 45, 95], [85, 105, 20], [95, 65, 150], [110, 75, 45], [75, 85, 100]] },
};
const LOWEST_LOGPROB = -4; // and below: full color. exp(-4) is a probability of 2 %.
const WIDEST_RATIO = Math.log(1.5);

export const MODES = ["sampled", "logprob", "advantage", "ratio", "version", "turn"];

const mix = (ground, ink, share) => ground.map((value, place) => Math.round(value + (ink[place] - value) * share));
const clamp = (value) => Math.min(1, Math.max(0, value));

/**
 * The ground of a token as [r, g, b], or null for none: of context, and where nothing is known.
 * `most`: the largest |advantage| of the ledger; `first`: its lowest version.
 */
export function tint(mode, token, { most = 1, first = 0 } = {}, theme = "light") {
  const { ground, warm, up, down, kinds } = PALETTE[theme];
  if (mode === "turn") return token.turn === null || token.turn < 0 ? null : mix(ground, kinds[token.turn % kinds.length], token.sampled ? 0.8 : 0.3);
  if (!token.sampled) return null;
  if (mode === "sampled") return mix(ground, kinds[0], 0.8);
  if (mode === "version") return mix(ground, kinds[(token.version - first) % kinds.length], 0.8);
  if (mode === "logprob") return mix(ground, warm, clamp(token.logprob / LOWEST_LOGPROB));
  if (mode === "advantage") return token.advantage === null ? null : mix(ground, token.advantage < 0 ? down : up, clamp(Math.abs(token.advantage) / (most || 1)));
  const far = token.ratio === null || token.ratio <= 0 ? null : Math.log(token.ratio) / WIDEST_RATIO;
  return far === null ? null : mix(ground, far < 0 ? down : up, clamp(Math.abs(far)));
}

export const css = (rgb) => (rgb ? `rgb(${rgb.join(", ")})` : "");

/** What the colors of a mode mean: [{label, color}], from one end to the other. */
export function legend(mode, { most = 1, versions = [], turns = 0 } = {}, theme = "light") {
  const token = { sampled: true, logprob: 0, advantage: 0, ratio: 1, version: 0, turn: 0 };
  const at = (label, change) => ({ label, color: css(tint(mode, { ...token, ...change }, { most, first: versions[0] ?? 0 }, theme)) });
  const figure = (value) => String(Number(value.toPrecision(3)));
  if (mode === "sampled") return [at("sampled", {}), { label: "context", color: "" }];
  if (mode === "version") return versions.slice(0, 8).map((version) => at(`v${version}`, { version }));
  if (mode === "turn") return Array.from({ length: Math.min(turns, 8) }, (_, turn) => at(`turn ${turn}`, { turn }));
  if (mode === "logprob") return [0, -1, -2, -3, -4].map((logprob) => at(logprob === -4 ? "≤ -4" : figure(logprob), { logprob }));
  if (mode === "advantage") return [-most, -most / 2, 0, most / 2, most].map((advantage) => at(figure(advantage), { advantage }));
  return [1 / 1.5, 1 / 1.22, 1, 1.22, 1.5].map((ratio) => at(figure(ratio), { ratio }));
}
