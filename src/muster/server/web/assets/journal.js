// What happened to a training? The newest entries of its journal, older ones on demand, and each as it is written.

import { ask, trainingPath } from "./api.js";
import { onEntry, useRepeated } from "./live.js";
import { useEffect, useRef, useState } from "./html.js";

const PAGE = 200; // entries that are asked for at once
const MOST = 6000; // that are kept; the oldest go when more come
const TOGETHER_MS = 16; // a burst is drawn once

/** `{ events, older, more }`: entries, oldest first; whether there are older ones; how to get them. */
export function useJournal(metadata) {
  const [seen, set] = useState({ events: [], older: false, loaded: false });
  const waiting = useRef({ fresh: [], timer: 0, loaded: false });
  const draw = () => {
    const own = waiting.current;
    own.timer ||= setTimeout(() => {
      own.timer = 0;
      if (!own.loaded) return; // the rest is on its way
      const fresh = own.fresh;
      own.fresh = [];
      set((before) => withNewer(before, fresh));
    }, TOGETHER_MS);
  };
  useEffect(() => {
    const stop = onEntry(metadata.uid, (entry) => {
      waiting.current.fresh.push(entry);
      draw();
    });
    return () => {
      stop();
      clearTimeout(waiting.current.timer);
    };
  }, []);
  useRepeated(async (signal) => {
    waiting.current.loaded = false;
    const last = seen.events.at(-1)?.id ?? 0;
    const { items } = await ask(trainingPath(metadata, `/events?after=${last}&limit=${PAGE}`), { signal });
    const gap = items.length === PAGE; // what lies between them and what was known is asked for if somebody wants it
    set((before) => ({ ...(gap ? { events: items, older: true } : withNewer(before, items)), loaded: true }));
    waiting.current.loaded = true;
    draw();
  }, 0);
  const more = async () => {
    const { items } = await ask(trainingPath(metadata, `/events?before=${seen.events[0].id}&limit=${4 * PAGE}`));
    set((before) => { // somebody may have asked twice
      const older = items.filter((one) => one.id < before.events[0].id);
      return older.length || !items.length ? { ...before, events: [...older, ...before.events], older: items.length === 4 * PAGE } : before;
    });
  };
  return { ...seen, more };
}

function withNewer(before, items) {
  const last = before.events.at(-1)?.id ?? 0;
  const fresh = items.filter((one) => one.id > last);
  if (fresh.length === 0) return before;
  const events = [...before.events, ...fresh];
  return events.length > MOST ? { ...before, events: events.slice(-MOST / 2), older: true } : { ...before, events };
}
