// What is there now? All trainings that the token may see, kept up to date by one watch that survives everything.

import { Refusal, ask, now, sentEvents } from "./api.js";
import { useEffect, useState } from "./html.js";
import { stepOf } from "./words.js";

const FIRST_RETRY_MS = 300;
const LONGEST_RETRY_MS = 3000;
const RATE_WINDOW_MS = 20000;
const EVERYONE = ""; // in place of a uid

export const live = {
  trainings: new Map(), // uid → training
  loaded: false,
  connected: false,
  everConnected: false,
  lostAt: 0, // when the connection was lost
  epoch: 0, // counts connections: whoever follows a stream of its own starts again when it grows
};

const listeners = new Set();
const readers = new Map(); // uid → who reads its journal
const samples = new Map(); // uid → [{ at, step, round }]
let drawing = 0;
let hurry = () => {};
let seen = new AbortController(); // aborted while the page is hidden: a browser has six connections for all its tabs
document.addEventListener("visibilitychange", () => (document.hidden ? seen.abort() : (seen = new AbortController())));

function changed() {
  drawing ||= setTimeout(() => {
    drawing = 0;
    for (const listener of listeners) listener();
  }, Math.min(16 + live.trainings.size / 4, 250)); // a burst is drawn once, and a crowd less often
}

/** Draw the component again whenever something changed, and every second if it shows ages. */
export function useLive(everyMs = 0) {
  const [, set] = useState(0);
  useEffect(() => {
    const draw = () => set((count) => count + 1);
    listeners.add(draw);
    const timer = everyMs && setInterval(draw, everyMs);
    return () => {
      listeners.delete(draw);
      clearInterval(timer);
    };
  }, [everyMs]);
  return live;
}

/** Call `look` now, after each reconnection, and again so many milliseconds after each answer while the page is seen.
 * With 0 milliseconds one answer is enough, but one there must be. */
export function useRepeated(look, everyMs, ...changes) {
  useEffect(() => {
    const gone = new AbortController();
    let timer;
    const again = async () => {
      const answered = document.hidden || (await look(gone.signal).then(() => true, () => false));
      const pause = everyMs || (answered ? 0 : LONGEST_RETRY_MS);
      if (!gone.signal.aborted && pause) timer = setTimeout(again, pause);
    };
    if (live.connected) again();
    return () => {
      gone.abort();
      clearTimeout(timer);
    };
  }, [live.epoch, live.connected, ...changes]);
}

export const tryNow = () => hurry();

export function forget() {
  live.trainings.clear();
  Object.assign(live, { loaded: false, connected: false, everConnected: false });
}

/** List, then watch from there; come back after every interruption with what was seen last. */
export async function follow(signal, signedOut) {
  let version = null;
  let retry = FIRST_RETRY_MS;
  while (!signal.aborted) {
    const current = AbortSignal.any([signal, seen.signal]);
    try {
      version ??= await list(current);
      for await (const event of sentEvents("/v1/watch?events=true", { signal: current, headers: { "Last-Event-ID": version } })) {
        connect();
        retry = FIRST_RETRY_MS;
        if (event.kind === "error") break;
        if (event.data) take(JSON.parse(event.data));
        if (event.id) version = event.id;
      }
    } catch (error) {
      if (signal.aborted) return;
      if (current.aborted) {
        await shownAgain();
        continue;
      }
      if (error.status === 401) return signedOut(error);
      if (!(error instanceof Refusal)) throw error;
      if (error.status === 410) version = null;
    }
    disconnect();
    await new Promise((done) => {
      hurry = done;
      setTimeout(done, retry);
    });
    retry = Math.min(retry * 2, LONGEST_RETRY_MS);
  }
}

/** What was seen last stays on the page; nothing was lost, so nothing is said. */
async function shownAgain() {
  live.connected = false;
  changed();
  while (document.hidden) await new Promise((done) => document.addEventListener("visibilitychange", done, { once: true }));
}

async function list(signal) {
  const found = new Map();
  let version;
  let next = "";
  do {
    const page = await ask(`/v1/trainings?limit=1000&continue=${encodeURIComponent(next)}`, { signal });
    for (const one of page.items) found.set(one.metadata.uid, one);
    version ??= page.metadata.resourceVersion; // of the first page: the watch repeats what came meanwhile
    next = page.metadata.continue;
  } while (next);
  live.trainings = found;
  live.loaded = true;
  changed();
  return version;
}

/** Be told of each new entry of a training's journal; returns how to stop that. */
export function onEntry(uid, hear) {
  const mine = readers.get(uid) ?? new Set();
  readers.set(uid, mine.add(hear));
  return () => mine.delete(hear);
}

/** The same for the journals of all trainings. */
export const onEveryEntry = (hear) => onEntry(EVERYONE, hear);

function take({ type, object }) {
  if (type === "EVENT") return [object.uid, EVERYONE].forEach((uid) => readers.get(uid)?.forEach((hear) => hear(object)));
  const uid = object.metadata.uid;
  if (type === "DELETED") {
    live.trainings.delete(uid);
    samples.delete(uid);
  } else {
    live.trainings.set(uid, object);
    sample(uid, object);
  }
  changed();
}

function connect() {
  if (live.connected) return;
  Object.assign(live, { connected: true, everConnected: true, lostAt: 0, epoch: live.epoch + 1 });
  changed();
}

function disconnect() {
  live.lostAt ||= Date.now();
  live.connected = false;
  changed();
}

function sample(uid, training) {
  const step = stepOf(training);
  const { round, phase } = training.status;
  const before = samples.get(uid) ?? [];
  if (step === null || phase !== "ready") return samples.delete(uid);
  const last = before.at(-1);
  if (last?.step === step && last.round === round) return;
  const kept = before.filter((one) => one.round === round && one.step <= step && now() - one.at < RATE_WINDOW_MS);
  samples.set(uid, [...kept, { at: now(), step, round }]);
}

/** Steps per second over the last while, or null where too little was seen. */
export function rateOf(uid) {
  const seen = (samples.get(uid) ?? []).filter((one) => now() - one.at < RATE_WINDOW_MS);
  const took = seen.length > 1 ? seen.at(-1).at - seen[0].at : 0;
  return took > 500 ? ((seen.at(-1).step - seen[0].step) * 1000) / took : null;
}
