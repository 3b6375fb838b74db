// Who had which GPU when? A pool's events as spans, and spans as lanes; nothing here asks the server.

import { html, useEffect, useRef, useState } from "./html.js";
import { age, clock } from "./words.js";

const GENERATION = "actor_infer";
const TURNS = { expanding: "waking", expanded: "generating", shrinking: "leaving", draining: "leaving", seated: "workers", leaving: "leaving" };
const FREEING = new Set(["vacated", "released", "unregistered", "left"]);
const KEPT_MS = 2 * 3600 * 1000;
export const HUES = 8; // as the style sheet has them

export const stageOf = (holder) =>
  holder.cluster !== GENERATION ? holder.cluster.replace("actor_", "") : { granting: "waking", draining: "leaving" }[holder.state] ?? "generating";

/** What a pool says of a GPU, in the words of its events; null if nobody has it. */
export function present(pool, gpu) {
  const [holder, worker] = [pool.leases[gpu], pool.workers?.[gpu]];
  if (holder) return { pipeline: holder.pipeline, stage: stageOf(holder) };
  return worker ? { pipeline: `training ${worker.training}`, stage: worker.state === "draining" ? "leaving" : "workers" } : null;
}

export const emptyHistory = () => ({ spans: [], open: new Map(), pipelines: [] });

/** The history with these events told, and the present as the pool itself says it is. */
export function told(history, events, pool, nowMs) {
  const open = new Map(history.open);
  const spans = history.spans.filter((span) => nowMs - span.end < KEPT_MS);
  const turn = (gpu, at, next) => {
    const before = open.get(gpu);
    if (before && next && before.pipeline === next.pipeline && before.stage === next.stage) return;
    if (before && at > before.start) spans.push({ ...before, end: at });
    if (next) open.set(gpu, { gpu, start: at, ...next });
    else open.delete(gpu);
  };
  for (const event of events) {
    const at = Date.parse(event.at);
    const stage = event.kind === "granted" && event.cluster !== GENERATION ? event.cluster.replace("actor_", "") : TURNS[event.kind];
    if (!stage && !FREEING.has(event.kind)) continue;
    for (const gpu of event.gpus) turn(gpu, at, stage && { pipeline: event.pipeline, stage });
  }
  for (let gpu = 0; gpu < pool.gpus; gpu++) { // events from before a restart are gone; what is held now is known
    turn(gpu, nowMs, present(pool, gpu));
  }
  const seen = [...history.pipelines, ...pool.pipelines.map((one) => one.id), ...spans.map((span) => span.pipeline),
    ...[...open.values()].map((span) => span.pipeline)];
  return { spans, open, pipelines: [...new Set(seen)] };
}

const LANE = 26;
const LEFT = 58;
const AXIS = 24;
const CHARACTER = 6.5;
const NARROW = 620;
const MOST_SPANS = 4000;

export function Lanes({ pool, history, windowMs, nowMs }) {
  const box = useRef();
  const width = useWidth(box);
  const start = nowMs - windowMs;
  const x = (time) => LEFT + ((Math.max(time, start) - start) / windowMs) * (width - LEFT);
  const spans = [...history.spans.filter((span) => span.end > start).slice(-MOST_SPANS),
    ...[...history.open.values()].map((span) => ({ ...span, end: nowMs }))];
  const height = pool.gpus * LANE + AXIS;
  const marks = width < NARROW ? [0, 0.5, 1] : [0, 0.25, 0.5, 0.75, 1];
  return html`<div class="lane-box" ref=${box}><svg class="lanes" width=${width} height=${height} role="img"
      aria-label=${`${pool.gpus} GPUs over the last ${age(windowMs)}; what each does now is listed below`}>
    <defs><pattern id="moving" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
      <rect class="stripe" width="3" height="6" /></pattern></defs>
    ${Array.from({ length: pool.gpus }, (_, gpu) => html`<g key=${gpu}>
      <text class="axis" x="0" y=${gpu * LANE + 17}>GPU ${gpu}</text>
      <rect class="lane" x=${LEFT} y=${gpu * LANE + 2} width=${width - LEFT} height=${LANE - 4} rx="3" />
    </g>`)}
    ${spans.map((span) => html`<${Span} key=${`${span.gpu}-${span.start}`} span=${span} x=${x} hue=${history.pipelines.indexOf(span.pipeline) % HUES} />`)}
    ${marks.map((part) => html`<text key=${part} class="axis" y=${height - 6} x=${LEFT + part * (width - LEFT)}
      text-anchor=${part === 0 ? "start" : part === 1 ? "end" : "middle"}>${part === 1 ? "now" : clock(start + part * windowMs)}</text>`)}
  </svg></div>`;
}

export function useWidth(box) {
  const [width, setWidth] = useState(NARROW);
  useEffect(() => {
    const observer = new ResizeObserver(([{ contentRect }]) => setWidth(Math.floor(contentRect.width)));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return width;
}

function Span({ span, x, hue }) {
  const [from, to] = [x(span.start), x(span.end)];
  const box = { x: from, y: span.gpu * LANE + 2, width: Math.max(to - from, 1), height: LANE - 4, rx: 3 };
  const words = `${span.pipeline} ${span.stage}`;
  const room = Math.floor((box.width - 10) / CHARACTER);
  const label = room >= words.length ? words : room >= span.stage.length ? span.stage : "";
  const moving = span.stage === "waking" || span.stage === "leaving";
  return html`<g>
    <title>${`GPU ${span.gpu}: ${words}, ${age(span.end - span.start)} from ${clock(span.start)}`}</title>
    <rect ...${box} class=${`hue-${hue} ${span.stage === "generating" || moving ? "" : "deep"}`} />
    ${moving && html`<rect ...${box} fill="url(#moving)" />`}
    ${label && html`<text class=${`hue-${hue} ${span.stage === "generating" || moving ? "" : "deep"}`} x=${from + 6} y=${span.gpu * LANE + 17}>${label}</text>`}
  </g>`;
}
