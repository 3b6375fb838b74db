// How does the page speak to the control plane? Requests and streams with the token in a header, never in an address.

const KEPT = "muster-token";
const SILENCE_MS = 25000; // the server says something every ten seconds

let token = sessionStorage.getItem(KEPT) ?? "";
let behindMs = 0; // how far the clock of this machine is behind the server's
let warning = ""; // what the control plane said of itself with its last answer

export const hasToken = () => token !== "";
export const now = () => Date.now() + behindMs;
export const warned = () => warning;

export function keepToken(given) {
  token = given;
  if (given) sessionStorage.setItem(KEPT, given);
  else sessionStorage.removeItem(KEPT);
}

/** What went wrong, in the server's words. Status 0: there was no answer at all. */
export class Refusal extends Error {
  constructor(status, error = {}) {
    super(error.message ?? (status ? `the server answered ${status}` : "the control plane does not answer"));
    this.status = status;
    this.hint = error.hint ?? "";
  }
}

async function send(path, { method = "GET", body, headers = {}, signal } = {}) {
  const sent = { ...headers, Authorization: `Bearer ${token}` };
  if (body !== undefined) sent["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers: sent, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    throw signal?.aborted ? error : new Refusal(0);
  }
  warning = (answer.headers.get("Warning") ?? "").replace(/^[^"]*"|"$/g, "");
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => ({}));
  throw new Refusal(answer.status, told.error);
}

export async function ask(path, options) {
  const answer = await send(path, options);
  const date = Date.parse(answer.headers.get("Date") ?? "");
  if (Math.abs(date - now()) > 2000) behindMs = date - Date.now();
  return answer.json();
}

/** Pieces of text as they come. A stream that has been silent for too long counts as broken, if it should not be. */
export async function* pieces(path, { signal, headers, beats = false } = {}) {
  const own = new AbortController();
  const stop = () => own.abort();
  signal?.addEventListener("abort", stop);
  let alarm;
  try {
    const answer = await send(path, { headers, signal: own.signal });
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      if (beats) alarm = setTimeout(stop, SILENCE_MS);
      const { done, value } = await reader.read();
      clearTimeout(alarm);
      if (done) return;
      yield value;
    }
  } catch (error) {
    throw error instanceof Refusal || signal?.aborted ? error : new Refusal(0);
  } finally {
    clearTimeout(alarm);
    signal?.removeEventListener("abort", stop);
    stop();
  }
}

/** Server-sent events. EventSource cannot send the token in a header, so they are read here. */
export async function* sentEvents(path, options) {
  let rest = "";
  for await (const piece of pieces(path, { ...options, beats: true })) {
    const blocks = (rest + piece).split("\n\n");
    rest = blocks.pop();
    yield* blocks.map(readEvent);
  }
}

function readEvent(block) {
  const event = { kind: "", id: "", data: "" };
  for (const line of block.split("\n")) {
    const at = line.indexOf(":");
    const [name, value] = [line.slice(0, at), line.slice(at + 1).trimStart()];
    if (name === "event") event.kind = value;
    else if (name === "id") event.id = value;
    else if (name === "data") event.data += value;
  }
  return event;
}

export const trainingPath = ({ namespace, name }, tail = "") =>
  `/v1/namespaces/${encodeURIComponent(namespace)}/trainings/${encodeURIComponent(name)}${tail}`;
