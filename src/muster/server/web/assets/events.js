// What happens everywhere? Entries of the journals of all trainings that the token may see, the newest first.

import { Refusal, ask } from "./api.js";
import { onEveryEntry, useLive, useRepeated } from "./live.js";
import { Empty, Icon } from "./parts.js";
import { addressOf } from "./trainings.js";
import { html, useEffect, useMemo, useRef, useState } from "./html.js";
import { entriesOf, exactly, moment, plural } from "./words.js";

const ASKED = 500;
const MOST = 2000; // that are kept
const SHOWN = 200;
const TOGETHER_MS = 100;

export function EventsPage() {
  useLive();
  const events = useAllEvents();
  const [words, setWords] = useState("");
  const [worries, setWorries] = useState(false);
  const [most, setMost] = useState(SHOWN);
  const shown = useMemo(() => chosen(events, words, worries, most + 1), [events, words, worries, most]);
  return html`
    <div class="heading"><h1 tabindex="-1">Events</h1><div class="filters">
      <label class="check"><input type="checkbox" checked=${worries} onChange=${(event) => setWorries(event.target.checked)} /> Warnings only</label>
      <input type="search" placeholder="Find by training or words" aria-label="Find by training or words" value=${words}
        onInput=${(event) => setWords(event.target.value)} /></div></div>
    ${shown.length === 0 ? html`<${Empty} title=${events.length ? "No event is like that" : "Nothing has happened yet"}>
        <p>What happens to any training appears here at once.</p><//>`
      : html`<section class="card" aria-label="Events of all trainings"><ol class="all-events">
        ${shown.slice(0, most).map((one) => html`<li key=${one.key} class=${`of-${one.kind} ${one.warning ? "worry" : ""}`}>
          <time datetime=${one.at} title=${moment(one.at)}>${exactly(one.at)}</time>
          <span class="dot"><${Icon} name=${one.kind} /></span>
          <a href=${addressOf(one)}>${one.name}</a>
          <div><b>${one.title}</b> ${one.text}</div></li>`)}</ol>
        ${shown.length > most && html`<button class="plain" onClick=${() => setMost(most * 2)}>Show older</button>`}
      </section>`}
    <p class="unseen" role="status">${plural(Math.min(shown.length, most), "event")} shown</p>`;
}

/** The newest, where the control plane can be asked for them; and each from now on. */
function useAllEvents() {
  const [events, set] = useState([]);
  const waiting = useRef({ fresh: [], timer: 0 });
  const add = (items) => set((before) => {
    const known = new Set(before.map((one) => one.id));
    const fresh = items.filter((one) => !known.has(one.id));
    return fresh.length ? [...before, ...fresh].sort((one, other) => one.id - other.id).slice(-MOST) : before;
  });
  useEffect(() => {
    const own = waiting.current;
    const stop = onEveryEntry((entry) => {
      own.fresh.push(entry);
      own.timer ||= setTimeout(() => {
        own.timer = 0;
        add(own.fresh.splice(0));
      }, TOGETHER_MS);
    });
    return () => {
      stop();
      clearTimeout(own.timer);
    };
  }, []);
  useRepeated(async (signal) => {
    try {
      add((await ask(`/v1/events?limit=${ASKED}`, { signal })).items);
    } catch (error) {
      if (!(error instanceof Refusal) || error.status !== 404) throw error; // an older control plane tells only what comes
    }
  }, 0);
  return events;
}

function chosen(events, words, worries, most) {
  const wanted = words.toLowerCase().split(/\s+/).filter(Boolean);
  const found = [];
  for (let at = events.length - 1; at >= 0 && found.length < most; at--) {
    const { namespace, training } = events[at];
    for (const one of entriesOf(events[at]).reverse()) {
      const text = `${namespace}/${training} ${one.title} ${one.text}`.toLowerCase();
      if ((!worries || one.warning) && wanted.every((word) => text.includes(word))) found.push({ ...one, namespace, name: training });
    }
  }
  return found;
}
