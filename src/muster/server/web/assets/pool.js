// How is a pool of shared GPUs? Its lanes, who waits and why, who has more or less than is due, who is quarantined.

import { ask, now } from "./api.js";
import { HUES, Lanes, emptyHistory, stageOf, told } from "./lanes.js";
import { live, useLive, useRepeated } from "./live.js";
import { Card, Empty, Fact } from "./parts.js";
import { html, useRef, useState } from "./html.js";
import { clock, count, moment } from "./words.js";

const LOOK_MS = 1000;
const WINDOWS = [["1", "1 minute"], ["5", "5 minutes"], ["30", "30 minutes"], ["120", "2 hours"]];
const EVENTS_SHOWN = 40;

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
          <p>RL pipelines share the GPUs of a pool. Give the control plane some when it starts:</p>
          <pre>MUSTER_POOL_GPUS=0,1,2,3 muster server start</pre><//>`
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
      <${Fact} name="Waiting">${count(pool.pending.length)}<//>
    </dl>
    <${Card} title="GPUs" aside=${html`<select aria-label="Window" value=${minutes} onChange=${(event) => setMinutes(event.target.value)}>
        ${WINDOWS.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}</select>`}>
      ${pool.pipelines.length === 0 && html`<p class="quiet">Nobody takes part now. See two pipelines take turns: <code>muster share demo</code></p>`}
      <${Lanes} pool=${pool} history=${history} windowMs=${minutes * 60000} nowMs=${live.connected ? now() : at} />
      <p class="key">${history.pipelines.map((one, place) => html`<span key=${one}><b class=${`hue-${place % HUES}`} />${one}</span>`)}
        <span><b class="stripes" />waking or leaving</span></p>
      <details><summary>What each GPU does now</summary><ul class="plain">
        ${Array.from({ length: pool.gpus }, (_, gpu) => html`<li key=${gpu}>GPU ${gpu}: ${holds(pool.leases[gpu])}</li>`)}</ul></details>
    <//>
    <div class="columns">
      <div>
        <${Card} title="Shares"><${Shares} pool=${pool} pipelines=${history.pipelines} /><//>
        <${Card} title="Queue"><ul class="entries">
          ${pool.pending.map((one) => html`<li key=${`${one.pipeline}-${one.cluster}`}><b>${one.pipeline}</b> ${one.cluster} <i>${one.priority.toLowerCase().replaceAll("_", " ")}</i><br />${one.reason}</li>`)}
          ${pool.pending.length === 0 && html`<li class="quiet">Nobody waits.</li>`}</ul><//>
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

const holds = (holder) => (holder ? `${holder.pipeline}, ${stageOf(holder)} (rank ${holder.rank})` : "idle");

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
