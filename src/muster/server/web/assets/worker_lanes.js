// How does the story of a training look? A lane of its rounds, and one for each worker, with losses and downtime.

import { now } from "./api.js";
import { useWidth } from "./lanes.js";
import { Card } from "./parts.js";
import { storyOf } from "./story.js";
import { html, useMemo, useRef, useState } from "./html.js";
import { clock, count, exactly, plural, took } from "./words.js";

const WINDOWS = [["0", "all that is loaded"], ["1", "1 minute"], ["10", "10 minutes"], ["60", "1 hour"], ["1440", "1 day"]];
const MOST_WORKERS = 64;
const MOST_ROUNDS = 400; // that are drawn
const MOST_TOLD = 50; // that are in the table
const [LEFT, AXIS, CHARACTER] = [92, 22, 6.5];

export function WorkerLanes({ training, journal }) {
  const [minutes, setMinutes] = useState("0");
  const { status } = training;
  const seats = JSON.stringify([status.phase, status.round, status.ranks.map((one) => one.worker)]);
  const nowMs = Math.floor(now() / 5000) * 5000; // the end moves every five seconds, or with what happens
  const story = useMemo(() => storyOf(journal.events, training, Math.max(now(), nowMs), !journal.older), [journal.events, seats, nowMs]);
  const picture = useMemo(() => html`<${Picture} story=${story} windowMs=${minutes * 60000} name=${training.metadata.name} />`, [story, minutes]);
  const table = useMemo(() => html`<${Table} story=${story} />`, [story]);
  const choose = html`<select aria-label="Window of the lanes" value=${minutes} onChange=${(event) => setMinutes(event.target.value)}>
    ${WINDOWS.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}</select>`;
  return html`<${Card} title="Workers over time" aside=${choose}>
    ${story.workers.length === 0 ? html`<p class="quiet">No worker has started yet.</p>` : html`${picture}
      <p class="key"><span><b class="trains" />trains</span><span><b class="waits" />waits, or a spare</span>
        <span><b class="down" />nobody trains</span><span><b class="gate" />waits for the mesh</span><span><b class="cross">✕</b>lost</span></p>
      ${table}`}
    ${journal.older && html`<p class="quiet">From the newest ${count(journal.events.length)} entries of its journal.
      <button class="plain" onClick=${journal.more}>Load older</button></p>`}
  <//>`;
}

/** Those that are there, then those that went last, in the order of their names. */
function chosen(workers, start) {
  const seen = workers.filter((one) => one.end >= start);
  const newest = [...seen].sort((one, other) => other.open - one.open || other.end - one.end).slice(0, MOST_WORKERS);
  return newest.sort((one, other) => one.name.localeCompare(other.name, "en", { numeric: true }));
}

function Picture({ story, windowMs, name }) {
  const box = useRef();
  const width = useWidth(box);
  const end = story.end;
  const start = windowMs ? Math.max(story.start, end - windowMs) : story.start;
  const workers = chosen(story.workers, start);
  const lane = workers.length > 16 ? 15 : 22;
  const x = (time) => LEFT + ((Math.min(Math.max(time, start), end) - start) / (end - start)) * (width - LEFT - 8);
  const bar = (one, row) => ({ x: x(one.start), y: row * lane + 2, width: Math.max(x(one.end) - x(one.start), 1.5), height: lane - 4, rx: 2 });
  const within = (one) => one.end >= start;
  const rounds = story.rounds.filter(within).slice(-MOST_ROUNDS);
  const height = (workers.length + 1) * lane + AXIS;
  const left = story.workers.filter(within).length - workers.length;
  const marks = width < 620 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1];
  const words = `${plural(workers.length, "worker")} of ${name} over ${took(end - start)}, with ${plural(rounds.length, "round")}; a table of rounds is below`;
  return html`<div class="lane-box tall" ref=${box} tabindex="0" role="region" aria-label="Lanes of workers">
    <svg class="lanes story" width=${width} height=${height} role="img" aria-label=${words}>
      <defs><pattern id="gap" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
        <rect class="stripe-bad" width="2.5" height="6" /></pattern>
        <pattern id="gate" width="5" height="5" patternUnits="userSpaceOnUse"><rect class="stripe-wait" width="2.5" height="2.5" /></pattern></defs>
      <text class="axis" x="0" y=${lane - 5}>rounds</text>
      ${rounds.map((one) => html`<g key=${`r${one.number}-${one.start}`}>
        <title>${`Round ${one.number}: ${took(one.end - one.start)}${one.open ? " so far" : ""} from ${exactly(one.start)}. ${one.why}`}</title>
        <rect class="round" ...${bar(one, 0)} />
        ${x(one.end) - x(one.start) > String(one.number).length * CHARACTER + 8 && html`<text class="round" x=${(x(one.start) + x(one.end)) / 2}
          y=${lane - 5} text-anchor="middle">${one.number}</text>`}</g>`)}
      ${story.gates.filter(within).map((one) => html`<g key=${`g${one.start}`}><title>${`The mesh: ${took(one.end - one.start)}. ${one.why}`}</title>
        <rect class="gate" ...${bar(one, 0)} fill="url(#gate)" /></g>`)}
      ${workers.map((one, at) => html`<${Lane} key=${one.name} worker=${one} row=${at + 1} lane=${lane} x=${x} bar=${bar} />`)}
      ${story.downs.filter(within).slice(-MOST_ROUNDS).map((one) => html`<g key=${`d${one.start}`}>
        <title>${`Nobody trained for ${took(one.end - one.start)} from ${exactly(one.start)}`}</title>
        <rect class="gap" x=${x(one.start)} y="0" width=${Math.max(x(one.end) - x(one.start), 1.5)} height=${height - AXIS} fill="url(#gap)" /></g>`)}
      ${marks.map((part) => html`<text key=${part} class="axis" y=${height - 6} x=${LEFT + part * (width - LEFT - 8)}
        text-anchor=${part === 0 ? "start" : part === 1 ? "end" : "middle"}>${
          part === 1 && !story.over ? "now" : (end - start < 5000 ? exactly : clock)(start + part * (end - start))}</text>`)}
    </svg></div>
    ${left > 0 && html`<p class="quiet">Without ${plural(left, "worker")} that went before.</p>`}`;
}

/** What still lasts has no right border; what was lost has a cross. */
function Lane({ worker, row, lane, x, bar }) {
  const { name, start, end, trains, lost, open, rank } = worker;
  const what = trains === null ? (open ? "a spare" : "was a spare") : rank === null ? "trained" : `rank ${rank}`;
  const how = lost ? `lost: ${worker.why}` : open ? "still there" : `ended${(worker.exitCode ?? null) === null ? "" : ` with ${worker.exitCode}`}`;
  const waits = trains === null ? end : Math.min(trains, end);
  return html`<g>
    <title>${`${name}: ${what}, ${took(end - start)} from ${exactly(start)}, ${how}`}</title>
    <text class="axis" x="0" y=${row * lane + lane - 5}>${name.length > 13 ? `…${name.slice(-12)}` : name}</text>
    ${waits > start && html`<rect class="waits" ...${bar({ start, end: waits }, row)} />`}
    ${trains !== null && end > trains && html`<rect class="trains" ...${bar({ start: Math.max(trains, start), end }, row)} />`}
    ${lost && html`<text class="cross" x=${Math.min(x(end) + 2, x(Infinity) - 2)} y=${row * lane + lane - 4}>✕</text>`}
  </g>`;
}

function Table({ story }) {
  const rounds = story.rounds.slice(-MOST_TOLD).reverse();
  const down = new Map(story.downs.map((one) => [one.before, one]));
  const all = story.downs.reduce((sum, one) => sum + one.end - one.start, 0);
  return html`<details><summary>Rounds: ${count(story.rounds.length)}, nobody trained for ${took(all)} between them</summary>
    <div class="scroll" tabindex="0" role="region" aria-label="Rounds"><table class="tight"><thead><tr><th scope="col">Round</th><th scope="col">Began</th>
      <th scope="col" class="number">Lasted</th><th scope="col" class="number">Down before</th><th scope="col">Why</th></tr></thead>
    <tbody>${rounds.map((one) => html`<tr key=${`${one.number}-${one.start}`}><th scope="row">${one.number}</th><td>${exactly(one.start)}</td>
      <td class="number">${took(one.end - one.start)}${one.open ? " so far" : ""}</td>
      <td class="number">${down.has(one.number) ? took(down.get(one.number).end - down.get(one.number).start) : "–"}</td>
      <td class="words">${one.why || "–"}</td></tr>`)}</tbody></table></div></details>`;
}
