// How does it go? What a training measures of itself as curves over time, and what each worker uses.

import { ask, now, trainingPath } from "./api.js";
import { useWidth } from "./lanes.js";
import { useRepeated } from "./live.js";
import { Card } from "./parts.js";
import { html, useMemo, useRef, useState } from "./html.js";
import { age, bytes, clock, count, isOver, number, plural } from "./words.js";

const LOOK_MS = 2000;
const MOST_POINTS = 5000; // of a curve that are kept; every second one goes when there are more
const MOST_CURVES = 12;
const STALE_MS = 30000;
const TOLD = 20; // newest points in the table
const NAMES = { steps_per_second: "steps/s", world_size: "world size" };
const FIRST = ["loss", "steps_per_second", "world_size"];
const STEPPED = new Set(["world_size"]);
const FROM_ZERO = new Set(["world_size", "steps_per_second"]);
const [HEIGHT, LEFT, BOTTOM, TOP] = [128, 46, 18, 6];

/** What is measured, and more of it while the training goes on. `known` is false where nobody measures. */
export function useMetrics(training) {
  const { metadata } = training;
  const [found, set] = useState({ series: new Map(), workers: [], known: true });
  const last = useRef({ at: 0, missing: false, done: false });
  useRepeated(async (signal) => {
    const own = last.current;
    if (own.missing || own.done) return;
    try {
      const told = await ask(trainingPath(metadata, `/metrics${own.at ? `?after=${own.at}` : ""}`), { signal });
      own.done = isOver(training);
      const fresh = (told.series ?? []).filter((one) => one.points.length > 0);
      own.at = Math.max(own.at, ...fresh.map((one) => one.points.at(-1)[1]));
      set((before) => ({ series: fresh.length ? grown(before.series, fresh) : before.series, workers: told.workers ?? [], known: true }));
    } catch (error) {
      own.missing = error.status === 404; // an older control plane
      if (own.missing) set((before) => ({ ...before, known: false }));
    }
  }, LOOK_MS, isOver(training));
  return found;
}

function grown(series, fresh) {
  const all = new Map(series);
  for (const { name, points } of fresh) {
    const known = all.get(name) ?? [];
    const last = known.at(-1)?.[1] ?? -Infinity;
    const joined = [...known, ...points.filter((one) => one[1] > last && Number.isFinite(one[2]))];
    all.set(name, joined.length > MOST_POINTS ? joined.filter((_, at) => at % 2 === 1 || at === joined.length - 1) : joined);
  }
  return all;
}

export function Curves({ metrics }) {
  const names = [...metrics.series.keys()].filter((name) => name !== "step" && metrics.series.get(name).length > 0);
  const shown = [...FIRST.filter((name) => names.includes(name)), ...names.filter((name) => !FIRST.includes(name)).sort()];
  if (shown.length === 0) return null;
  return html`<${Card} title="Curves"><div class="curves">
    ${shown.slice(0, MOST_CURVES).map((name) => html`<${Curve} key=${name} name=${name} points=${metrics.series.get(name)} />`)}</div>
    ${shown.length > MOST_CURVES && html`<p class="quiet">And ${count(shown.length - MOST_CURVES)} more.</p>`}
  <//>`;
}

function Curve({ name, points }) {
  const box = useRef();
  const width = useWidth(box);
  const [at, setAt] = useState(null); // the point that is pointed to
  const words = NAMES[name] ?? name;
  const plot = useMemo(() => plotOf(points, width, name), [points, width]);
  const [first, last] = [points[0], points.at(-1)];
  const chosen = points[Math.min(at ?? points.length - 1, points.length - 1)];
  const point = (event) => setAt(nearest(points, plot.timeAt(event.clientX - box.current.getBoundingClientRect().left)));
  const move = (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20, Home: -Infinity, End: Infinity }[event.key];
    if (!step) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(points.length - 1, (at ?? points.length - 1) + step)));
  };
  return html`<figure class="curve">
    <figcaption><b>${words}</b> <span>${number(chosen[2])} <i>${at !== null && placeOf(chosen)}</i></span></figcaption>
    <div ref=${box} tabindex="0" role="slider" aria-label=${`${words} over time`} aria-valuemin="0" aria-valuemax=${points.length - 1}
        aria-valuenow=${Math.min(at ?? points.length - 1, points.length - 1)} aria-valuetext=${`${number(chosen[2])} at ${clock(chosen[1] * 1000)}`}
        onPointerMove=${point} onPointerLeave=${() => setAt(null)} onBlur=${() => setAt(null)} onKeyDown=${move}>
      <svg width=${width} height=${HEIGHT} aria-hidden="true">
        ${plot.ticks.map(({ value, y }) => html`<g key=${value}><line class="grid" x1=${LEFT} x2=${width} y1=${y} y2=${y} />
          <text class="axis" x=${LEFT - 6} y=${y + 4} text-anchor="end">${number(value)}</text></g>`)}
        <path class="curve-band" d=${plot.band} /><path class="curve-line" d=${plot.path} />
        ${points.length === 1 && html`<circle class="curve-point" r="2.5" cx=${plot.x(first)} cy=${plot.y(first)} />`}
        ${at !== null && html`<line class="pointed" x1=${plot.x(chosen)} x2=${plot.x(chosen)} y1=${TOP} y2=${HEIGHT - BOTTOM} />
          <circle class="curve-point" r="3.5" cx=${plot.x(chosen)} cy=${plot.y(chosen)} />`}
        <text class="axis" x=${LEFT} y=${HEIGHT - 3}>${clock(first[1] * 1000)}</text>
        <text class="axis" x=${width} y=${HEIGHT - 3} text-anchor="end">${clock(last[1] * 1000)}</text>
      </svg>
    </div>
    <details><summary>${`${words}: ${plural(points.length, "value")}`}</summary>
      <${Values} words=${words} points=${points} /></details>
  </figure>`;
}

const placeOf = ([step, time]) => `${(step ?? null) === null ? "" : `step ${count(step)}, `}${clock(time * 1000)}`;

const Values = ({ words, points }) => html`<table class="tight"><caption class="unseen">The newest values of ${words}</caption>
  <thead><tr><th scope="col">Time</th><th scope="col" class="number">Step</th><th scope="col" class="number">${words}</th></tr></thead>
  <tbody>${points.slice(-TOLD).reverse().map(([step, time, value]) => html`<tr key=${time}><th scope="row">${clock(time * 1000)}</th>
    <td class="number">${count(step)}</td><td class="number">${number(value)}</td></tr>`)}</tbody></table>`;

/** Where each point is, and one path: of many in one column of pixels their mean, and a band from least to most. */
function plotOf(points, width, name) {
  const [from, to] = [points[0][1], Math.max(points.at(-1)[1], points[0][1] + 1e-3)];
  let [low, high] = [Infinity, -Infinity];
  for (const [, , value] of points) [low, high] = [Math.min(low, value), Math.max(high, value)];
  if (FROM_ZERO.has(name)) low = Math.min(0, low);
  const ticks = ticksOf(low, high, STEPPED.has(name) ? 1 : 0);
  [low, high] = [Math.min(low, ticks[0]), Math.max(high, ticks.at(-1))];
  const x = (one) => LEFT + ((one[1] - from) / (to - from)) * (width - LEFT - 4);
  const yOf = (value) => HEIGHT - BOTTOM - ((value - low) / (high - low)) * (HEIGHT - BOTTOM - TOP);
  const at = (px, value) => `${px.toFixed(1)} ${yOf(value).toFixed(1)}`;
  const columns = STEPPED.has(name) ? [] : columnsOf(points, x);
  const path = STEPPED.has(name)
    ? points.map((one, place) => (place === 0 ? `M${at(x(one), one[2])}` : `H${x(one).toFixed(1)}V${yOf(one[2]).toFixed(1)}`)).join("")
    : columns.map((one, place) => `${place === 0 ? "M" : "L"}${at(one.x, one.mean)}`).join("");
  const dense = columns.length < points.length;
  const edge = dense ? [...columns.map((one) => at(one.x, one.high)), ...columns.toReversed().map((one) => at(one.x, one.low))] : [];
  return {
    x, y: (one) => yOf(one[2]), path, band: edge.length ? `M${edge.join("L")}Z` : "", ticks: ticks.map((value) => ({ value, y: yOf(value) })),
    timeAt: (px) => from + ((px - LEFT) / (width - LEFT - 4)) * (to - from),
  };
}

function columnsOf(points, x) {
  const found = [];
  for (const one of points) {
    const [px, value] = [x(one), one[2]];
    const last = found.at(-1);
    if (!last || Math.floor(px) !== last.column) {
      found.push({ column: Math.floor(px), x: px, low: value, high: value, mean: value, count: 1 });
    } else {
      last.count++;
      last.mean += (value - last.mean) / last.count;
      [last.low, last.high] = [Math.min(last.low, value), Math.max(last.high, value)];
    }
  }
  return found;
}

/** Two to five round numbers between these, or around one, and not nearer than that. */
function ticksOf(low, high, least) {
  const range = high - low || Math.abs(high) || 1;
  const size = 10 ** Math.floor(Math.log10(range / 3));
  const step = Math.max(least, [1, 2, 5, 10].map((by) => by * size).find((one) => range / one <= 4));
  const ticks = [];
  for (let at = Math.floor(low / step); at * step <= high + step * 0.999; at++) ticks.push(Number((at * step).toPrecision(12)));
  return ticks.length > 1 ? ticks : [ticks[0], ticks[0] + step];
}

function nearest(points, time) {
  let [low, high] = [0, points.length - 1];
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (points[middle][1] < time) low = middle;
    else high = middle;
  }
  return time - points[low][1] < points[high][1] - time ? low : high;
}

// Workers -----------------------------------------------------------------------------------------

/** What each worker takes of its machine. */
export function WorkerUse({ workers, status }) {
  if (workers.length === 0) return null;
  const seats = new Map(status.ranks.map((one) => [one.worker, one.rank]));
  const parts = new Map((status.workers ?? []).map((one) => [one.name, one.role]));
  const isDead = (one) => !status.finishedAt && (parts.get(one.name) ?? "dead") === "dead"; // it is listed while it is there
  const part = (one) => (isDead(one) ? "dead" : seats.get(one.name) ?? parts.get(one.name) ?? "–");
  const place = (one) => seats.get(one.name) ?? Infinity;
  const rows = [...workers].sort((one, other) => place(one) - place(other) || one.name.localeCompare(other.name, "en", { numeric: true }));
  const gpus = rows.some((one) => (one.gpuPercent ?? null) !== null || (one.gpuMemoryBytes ?? null) !== null);
  const percent = (value) => ((value ?? null) === null ? "–" : `${Math.round(value)} %`);
  const size = (value) => ((value ?? null) === null ? "–" : bytes(value));
  return html`<${Card} title="Use of workers"><div class="scroll low" tabindex="0" role="region" aria-label="CPU, memory and GPU of each worker">
    <table class="tight"><thead><tr><th scope="col">Worker</th><th scope="col" class="number">Rank</th><th scope="col" class="number">CPU</th>
      <th scope="col" class="number">Memory</th>${gpus && html`<th scope="col" class="number">GPU</th><th scope="col" class="number">GPU memory</th>`}</tr></thead>
    <tbody>${rows.map((one) => {
      const old = now() - one.at * 1000;
      return html`<tr key=${one.name} class=${old > STALE_MS ? "quiet" : ""}><th scope="row">${one.name}${old > STALE_MS && html`<i>${age(old)} ago</i>`}</th>
        <td class="number">${part(one)}</td><td class="number">${percent(one.cpuPercent)}</td><td class="number">${size(one.memoryBytes)}</td>
        ${gpus && html`<td class="number">${percent(one.gpuPercent)}</td><td class="number">${size(one.gpuMemoryBytes)}</td>`}</tr>`;
    })}</tbody></table></div><//>`;
}
