// The server's JSON, and hooks that read it.
import { useEffect, useState } from "./html.js";
import { search } from "./router.js";

export class ApiError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status; // 0: no answer at all
  }
}

/** The address of parts of the API: address("runs", name, "episodes") with names escaped. */
export const address = (...parts) => `api/${parts.map(encodeURIComponent).join("/")}`;

export const get = async (path, query = {}, signal = undefined) => (await read(path, query, signal)).body;

/** {text, body} of an answer: as it came, and parsed. Throws ApiError. */
async function read(path, query, signal) {
  const asked = search(query);
  let response;
  try {
    response = await fetch(asked ? `${path}?${asked}` : path, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server does not answer. Is `agentrl view` still running?", 0);
  }
  let text;
  let body;
  try {
    text = await response.text();
    body = JSON.parse(text);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(`The server answered ${response.status} without JSON.`, response.status);
  }
  if (!response.ok) throw new ApiError(String(body?.error ?? `The server answered ${response.status}.`), response.status);
  return { text, body };
}

/**
 * What `path` answers for `query`, again every `every` ms if given: {data, error, loading, again}.
 * While another query of the same path loads, the last answer stays, so that a table does not flicker; an answer that is the same
 * as the last one changes nothing. A null path asks nothing.
 */
export function useApi(path, query = {}, every = 0) {
  const key = path === null ? null : `${path}?${search(query)}`;
  const [state, setState] = useState({ path: null, key: null, data: null, text: null, error: null });
  const [round, setRound] = useState(0);
  useEffect(() => {
    if (key === null) return undefined;
    const controller = new AbortController();
    let timer;
    const load = async () => {
      try {
        const { text, body } = await read(path, query, controller.signal);
        setState((old) => (old.key === key && old.text === text && !old.error ? old : { path, key, data: body, text, error: null }));
      } catch (error) {
        if (error.name === "AbortError") return;
        setState((old) => ({ path, key, data: old.path === path ? old.data : null, text: null, error }));
      }
      if (every && !controller.signal.aborted) timer = setTimeout(load, document.hidden ? 5 * every : every);
    };
    load();
    return () => {
      controller.abort();
      clearTimeout(timer);
    };
  }, [key, every, round]);
  const fresh = state.key === key;
  return {
    data: state.path === path ? state.data : null,
    error: fresh ? state.error : null,
    loading: key !== null && !fresh,
    again: () => setRound((n) => n + 1),
  };
}
