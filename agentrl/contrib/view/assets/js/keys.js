// Keys. A page says which it answers; the frame answers "/", "?" and "t".
import { useLayoutEffect, useRef } from "./html.js";

const typing = (target) => target.closest?.("input:not([type=checkbox], [type=radio], [type=range]), textarea, select, dialog");

/** While the caller is shown, `actions[key]()` answers a key that is pressed alone and outside of fields. */
export function useKeys(actions) {
  const latest = useRef(actions);
  latest.current = actions;
  // With what is drawn, not after it: who sees a row can press a key.
  useLayoutEffect(() => {
    const answer = (event) => {
      if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented || typing(event.target)) return;
      if (event.key === "Enter" && event.target.closest("a, button")) return; // it is that one's
      const action = latest.current[event.key];
      if (!action) return;
      event.preventDefault();
      action();
    };
    addEventListener("keydown", answer);
    return () => removeEventListener("keydown", answer);
  }, []);
}

export const HELP = [
  ["j / k / ↓ / ↑", "next and previous row of a list; in an episode (also → / ←) the next and previous one"],
  ["Enter", "open the chosen row"],
  ["n / p", "next and previous page of episodes"],
  ["[ / ]", "in an episode: the sibling before and after it in its group"],
  ["1 … 3", "in an episode: turns, tokens, everything as JSON"],
  ["/", "search"],
  ["u", "up: from an episode to the list, from a run to all runs"],
  ["t", "theme: as the system, light, dark"],
  ["?", "this help; Esc closes it"],
];
