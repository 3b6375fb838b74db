// How is a pool of shared GPUs? Its lanes, who waits and why, who has more or less than is due, who is quarantined.

import { ask, now } from "./api.js";
import { HUES, Lanes, emptyHistory, stageOf, told } from "./lanes.js";
import { live, useLive, useRepeated } from "./live.js";
import { Card, Empty, Fact } from "./parts.js";
import { html, useRef, useState } from "./html.js";
import { clock, count, hours, moment, since } from "./words.js";

const LOOK_MS = 1000;
const WINDOWS = [["1", "1 minute"], ["5", "5 minutes"], ["30", "30 minutes"], ["120", "2 hours"]];
const EVENTS_SHOWN = 40;
const MOST_GPUS = 256;
const MOST_WAITING = 100;
const MOST_USED = 20;

export function PoolPage({ name }) {
  useLive();
  const [pools, setPools] = useState(null);
  useRepeated(async (signal) => setPools((await ask("/v1/pools", { signal })).items.map((pool) => pool.name)), 0);
  const chosen = name ?? pools?.[0];
  return html`
    <div class="heading"><h1 tabindex="-1">Pool</h1>
      ${pools?.length > 1 && html`<nav class="chips" aria-label="Pools">${pools.map((one) =>
        html`<a key=${one} href=${`#/pool/${encodeURIComponent(one)}`} aria-current=${one === chosen ? "page" : null}>${one}</a>`)}</nav>`}
    </div>
    ${pools === null ? html`<p class="quiet">Loading…</p>`
      : !chosen ? html`<${Empty} title="There is no pool">
          <p>Trainings and RL pipelines share the GPUs of a pool: all that the control plane's machine has. Imitate some:</p>
          <pre>MUSTER_GPUS=4 muster server start</pre><//>`
      : html`<${One} key=${chosen} name=${chosen} />`}`;
}

function One({ name }) {
  const [seen, setSeen] = useState(null);
  const [minutes, setMinutes] = useState("1");
  const last = useRef({ id: 0, history: emptyHistory(), events: [] });
  const path = `/v1/pools/${encodeURIComponent(name)}`;
  useRepeated(async (signal) => {
    const [{ items }, pool] = [await ask(`${path}/events?after=${last.current.id}`, { signal }), await ask(path, { signal })];
    const before = last.current;
    last.current = {
      id: items.at(-1)?.id ?? before.id,
      history: told(before.history, items, pool, now()),
      events: [...before.events, ...items.filter((one) => one.kind !== "progress")].slice(-EVENTS_SHOWN),
    };
    setSeen({ pool, ...last.current, at: now() });
  }, LOOK_MS, name);
  if (!seen) return html`<p class="quiet">Loading…</p>`;
  const { pool, history, events, at } = seen;
  return html`
    <dl class="facts card">
      <${Fact} name="Pool">${pool.name}<//>
      <${Fact} name="GPUs">${count(pool.gpus)}<//>
      <${Fact} name="Idle">${count(pool.idle.length)}<//>
      <${Fact} name="Pipelines">${count(pool.pipelines.length)}<//>
      <${Fact} name="Trainings">${count(new Set(Object.values(pool.workers).map((one) => one.training)).size)}<//>
      <${Fact} name="Lent">${count(pool.holders.filter((one) => one.lentBy && one.state !== "idle").length)}<//>
      <${Fact} name="Waiting">${count(pool.waitingCount)}<//>
    </dl>
    <${Card} title="GPUs" aside=${html`<select aria-label="Window" value=${minutes} onChange=${(event) => setMinutes(event.target.value)}>
        ${WINDOWS.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}</select>`}>
      ${pool.pipelines.length === 0 && Object.keys(pool.workers).length === 0 && html`<p class="quiet">Nobody takes part now. See two pipelines take turns: <code>muster share demo</code></p>`}
      <${Lanes} pool=${pool} history=${history} windowMs=${minutes * 60000} nowMs=${live.connected ? now() : at} />
      <p class="key">${history.pipelines.map((one, place) => html`<span key=${one}><b class=${`hue-${place % HUES}`} />${one}</span>`)}
        <span><b class="stripes" />waking or leaving</span></p>
      <details><summary>What each GPU does now</summary><ul class="plain">
        ${pool.holders.slice(0, MOST_GPUS).map((one) => html`<li key=${one.gpu}>GPU ${one.gpu}: ${holds(one)}</li>`)}
        ${pool.holders.length > MOST_GPUS && html`<li class="quiet">And ${count(pool.holders.length - MOST_GPUS)} more; <code>muster pool</code> lists all.</li>`}</ul></details>
    <//>
    <div class="columns">
      <div>
        <${Card} title="Shares"><${Shares} pool=${pool} pipelines=${history.pipelines} /><//>
        <${Card} title="Queue"><ul class="entries">
          ${pool.waiting.slice(0, MOST_WAITING).map((one) => html`<li key=${`${one.pipeline}-${one.cluster}-${one.training}`}><b>${nameOf(one)}</b> ${
            one.pipeline ? one.cluster : `${one.workers} of ${one.wanted} worker${one.wanted === 1 ? "" : "s"}`} <i>${
            one.pipeline ? one.priority.toLowerCase().replaceAll("_", " ") : WAITS[one.state] ?? ""}</i><br />${one.reason}</li>`)}
          ${pool.waitingCount > MOST_WAITING && html`<li class="quiet">And ${count(pool.waitingCount - MOST_WAITING)} more.</li>`}
          ${pool.waitingCount === 0 && html`<li class="quiet">Nobody waits.</li>`}</ul><//>
        <${Card} title="Used"><ul class="entries">
          ${pool.usage.slice(0, MOST_USED).map((one) => html`<li key=${`${one.kind}-${one.name}-${one.since}`}><b>${usedBy(one)}</b> ${hours(one.gpuSeconds)} GPU-hours${
            one.gpus > 0 && html` <i>${count(one.gpus)} now</i>`}</li>`)}
          ${pool.usage.length > MOST_USED && html`<li class="quiet">And ${count(pool.usage.length - MOST_USED)} more; <code>muster pool -o json</code> has all.</li>`}</ul><//>
        <${Card} title="Quarantines"><ul class="entries">
          ${Object.entries(pool.quarantined).map(([one, why]) => html`<li key=${one} class="worry"><b>${one}</b><br />${why}</li>`)}
          ${Object.keys(pool.quarantined).length === 0 && html`<li class="quiet">None.</li>`}</ul><//>
      </div>
      <${Card} title="Decisions"><ol class="entries" tabindex="0" aria-label="Decisions">
        ${events.toReversed().map((one) => html`<li key=${one.id}><b>${one.pipeline || pool.name}</b> ${one.kind} ${one.cluster}${
          one.gpus.length > 0 && html` <i>GPU ${one.gpus.join(", ")}</i>`} <time datetime=${one.at} title=${moment(one.at)}>${clock(one.at)}</time>
          ${one.text && html`<br />${one.text}`}</li>`)}
        ${events.length === 0 && html`<li class="quiet">Nothing has happened since the control plane started.</li>`}</ol><//>
    </div>`;
}

const nameOf = (one) => one.pipeline ?? (one.training ? `training ${one.training}` : null);
const usedBy = (one) => ({ idle: "nobody", lost: "out of use" })[one.kind] ?? (one.name ? (one.kind === "training" ? `training ${one.name}` : one.name) : `former ${one.kind}s`);
const WAITS = { Lent: "lent", Queued: "queued", InsufficientGPUs: "needs more" };

/** Who has a GPU, for what, since when and by whom it is lent. */
function holds(one) {
  const lent = one.lentBy ? `; lent by ${one.lentBy}${one.lentWorker ? ` (${one.lentWorker})` : ""}` : "";
  const time = one.since ? ` since ${since(one.since)}` : "";
  if (one.pipeline) return `${one.pipeline}, ${stageOf(one)} (rank ${one.rank})${time}${lent}`;
  if (one.training) return `training ${one.training}, ${one.worker ?? "a worker to come"}${one.state === "draining" ? ", leaving" : ""}${time}`;
  return `${one.state === "lost" ? `out of use: ${one.reason}` : "idle"}${time}${lent}`;
}

/** What each pipeline has, beside what is due to its generation. */
function Shares({ pool, pipelines }) {
  if (pool.pipelines.length === 0) return html`<p class="quiet">No pipeline is registered.</p>`;
  return html`<ul class="shares">${pool.pipelines.map((one) => {
    const due = one.due ?? null;
    const words = `${one.held.length} of ${pool.gpus} GPUs${due === null ? "" : `, due ${due.toFixed(1)}`}`;
    const rollout = (one.remaining ?? null) === null ? "no open rollout" : `${count(one.target - one.remaining)} of ${count(one.target)} trajectories`;
    return html`<li key=${one.id}>
      <div><b>${one.id}</b> <i>${one.state}, weight ${one.weight}</i></div>
      <span class="meter" role="img" aria-label=${words}>
        <b class=${`hue-${pipelines.indexOf(one.id) % HUES}`} style=${{ width: `${(100 * one.held.length) / pool.gpus}%` }} />
        ${due !== null && html`<u style=${{ left: `${(100 * due) / pool.gpus}%` }} />`}
      </span>
      <div>${words} <i>· ${rollout}</i></div>
    </li>`;
  })}</ul>`;
}
