// Every view is a function of the address, `#/run/NAME/episodes?stop=done`, so that each can be bookmarked and sent.
import { useEffect, useState } from "./html.js";

/** {path: decoded parts, query: {name: value}} of a location's hash. */
export function parse(hash) {
  const rest = hash.replace(/^#?\/?/, "");
  const cut = rest.indexOf("?");
  const path = (cut < 0 ? rest : rest.slice(0, cut)).split("/").filter(Boolean).map(decoded);
  return { path, query: Object.fromEntries(new URLSearchParams(cut < 0 ? "" : rest.slice(cut + 1))) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // written by hand, with a lone %
  }
}

/** The query of an address; what is undefined, null or "" is left out. */
export function search(query) {
  const found = Object.entries(query).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return new URLSearchParams(found).toString();
}

export function href(path, query = {}) {
  const text = search(query);
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

/** Go to a view. `replace`: without an entry in the browser's history, for what is only an option of the same view. */
export function go(path, query = {}, replace = false) {
  const to = href(path, query);
  if (to === location.hash) return;
  if (!replace) {
    location.hash = to;
    return;
  }
  history.replaceState(null, "", to);
  dispatchEvent(new Event("hashchange"));
}

export function useRoute() {
  const [route, setRoute] = useState(() => parse(location.hash));
  useEffect(() => {
    const follow = () => setRoute(parse(location.hash));
    addEventListener("hashchange", follow);
    return () => removeEventListener("hashchange", follow);
  }, []);
  return route;
}
