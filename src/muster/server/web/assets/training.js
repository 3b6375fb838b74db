// How is one training? Its ranks, what happened to it and why, what it writes, and what may be done about it.

import { ask, now, trainingPath } from "./api.js";
import { Curves, WorkerUse, useMetrics } from "./curves.js";
import { useJournal } from "./journal.js";
import { live, rateOf, useLive, useRepeated } from "./live.js";
import { Log, LogPanel } from "./logs.js";
import { Orders } from "./orders.js";
import { Card, Empty, Fact, Icon, Phase, World } from "./parts.js";
import { Timeline } from "./timeline.js";
import { WorkerLanes } from "./worker_lanes.js";
import { html, useMemo, useRef, useState } from "./html.js";
import {
  against, age, bytes, clock, count, duration, isOver, isWorry, lastHeal, moment, plural, rate, reasonOf, since, stepOf,
} from "./words.js";

export function TrainingPage({ namespace, name, who }) {
  const { trainings, loaded } = useLive(1000);
  const seen = useRef(null);
  const found = [...trainings.values()].find(({ metadata: m }) => m.namespace === namespace && m.name === name);
  if (found) seen.current = found;
  if (!loaded) return html`<p class="quiet">Loading…</p>`;
  if (!found) {
    return html`<div class="heading"><h1 tabindex="-1">${name}</h1></div>
      <${Empty} title=${seen.current ? "It was deleted" : "There is no such training"}>
        <p>${seen.current ? "The training and its logs are gone; what it used stays under " : "See what there is under "}
        <a href=${seen.current ? "#/usage" : "#/trainings"}>${seen.current ? "Usage" : "Trainings"}</a>.</p>
      <//>`;
  }
  return html`<${One} key=${found.metadata.uid} training=${found} who=${who} />`;
}

function One({ training, who }) {
  const { metadata, status, spec } = training;
  const [rank, setRank] = useState(null);
  const news = JSON.stringify([metadata.generation, status.phase, status.round, status.conditions, status.spares,
    status.worldSize, status.ranks.map((one) => [one.worker, one.phase])]); // all but steps
  const explanation = useExplanation(metadata, news);
  const journal = useJournal(metadata);
  const metrics = useMetrics(training);
  const timeline = useMemo(() => html`<${Timeline} journal=${journal} />`, [journal.events, journal.older, journal.loaded]);
  const curves = useMemo(() => html`<${Curves} metrics=${metrics} />`, [metrics.series]);
  const failure = status.phase === "failed" ? status.outcome?.firstFailure ?? null : null;
  const log = useMemo(() => html`<${LogPanel} training=${metadata} failure=${failure} />`, [live.epoch, live.connected, Boolean(failure)]);
  const heal = lastHeal(journal.events);
  const grid = useMemo(() => html`<${Ranks} training=${training} chosen=${rank} choose=${setRank} />`, [status.ranks, status.spares, status.workers, rank]);
  return html`<article class=${status.phase === "failed" ? "is-over-failed" : ""}>
    <div class="heading">
      <div>
        <p class="crumbs"><a href="#/trainings">Trainings</a> / ${metadata.namespace} /</p>
        <h1 tabindex="-1">${metadata.name} <${Phase} name=${status.phase} /></h1>
      </div>
      <${Orders} training=${training} who=${who} />
    </div>
    <p class=${`why ${status.phase === "failed" ? "bad" : ""}`} aria-live="polite">${explanation?.summary ?? reasonOf(training)}</p>
    ${hasMore(status.outcome) && html`<pre class="tail" tabindex="0" role="region" aria-label="How it ended">${status.outcome.message.trim()}</pre>`}
    ${heal && status.phase !== "failed" && html`<p class="healed" role="status"><${Icon} name="promotion" /> Healed at ${clock(heal.at)}: ${heal.message}</p>`}
    <dl class="facts card">
      <${Fact} name="World"><${World} training=${training} /><//>
      <${Fact} name="Round">${count(status.round)} <i>${roundTimes(status)}</i><//>
      <${Fact} name="Restarts">${count(status.restarts)}<i> of ${count(spec.maxRestarts)}</i><//>
      <${Fact} name="Step">${count(stepOf(training))} <i>${rate(rateOf(metadata.uid))}</i><//>
      <${Fact} name=${isOver(training) ? "Took" : "Running"}>${took(status)}<//>
      <${Fact} name="GPUs">${count(spec.resources.gpus * (status.worldSize.ready + status.spares.ready))}<//>
      <${Fact} name="Runs"><code title=${program(spec)}>${program(spec)}</code><//>
    </dl>
    <div class="columns">
      <div>
        <${Card} title="Ranks" aside=${html`<${Legend} ranks=${status.ranks} />`}>
          ${grid}
          ${rank !== null && html`<${Rank} key=${rank} training=${training} rank=${rank} close=${() => setRank(null)} />`}
        <//>
        ${curves}
        <${WorkerLanes} training=${training} journal=${journal} />
        ${log}
      </div>
      <div>
        ${status.keptState && html`<${State} state=${status.keptState} />`}
        ${timeline}
        <${WorkerUse} workers=${metrics.workers} status=${status} />
        <${Card} title="Conditions"><ul class="conditions">
          ${status.conditions.map((one) => html`<li key=${one.type} class=${isWorry(one) ? "worry" : ""}>
            <${Icon} name=${isWorry(one) ? "lost" : "succeeded"} />
            <div><b>${one.type}</b> is ${one.status} <i>for ${since(one.lastTransitionTime)}</i><p>${one.message}</p></div>
          </li>`)}
          ${status.conditions.length === 0 && html`<li class="quiet">None yet.</li>`}
        </ul><//>
      </div>
    </div></article>`;
}

/** What its outcome says beyond its first line. */
const hasMore = (outcome) => outcome && outcome.state !== "succeeded" && outcome.message?.trim().includes("\n");

const program = (spec) => (spec.command ?? [spec.script ?? `-m ${spec.module}`]).concat(spec.args).join(" ");

/** How long the round took from the loss or the request that it follows. */
function roundTimes({ round, roundTimes: times }) {
  if (!times || times.round !== round) return "";
  const step = times.nextStepSeconds ?? null;
  return `ranks run after ${duration(times.ranksRunSeconds)}${step === null ? "" : `, next step after ${duration(step)}`}`;
}

function took({ startedAt, finishedAt }) {
  if (!startedAt) return "–";
  return age((finishedAt ? Date.parse(finishedAt) : now()) - Date.parse(startedAt));
}

function useExplanation(metadata, news) {
  const [found, set] = useState(null);
  useRepeated(async (signal) => set(await ask(trainingPath(metadata, "/explain"), { signal })), 0, news);
  return found;
}

// Ranks -------------------------------------------------------------------------------------------

const STATES = ["starting", "running", "stopping", "succeeded", "failed", "lost"];

const Legend = ({ ranks }) => html`<span class="legend">
  ${STATES.filter((state) => ranks.some((one) => one.phase === state)).map((state) => html`<span key=${state} class=${`is-${state}`}>
    <${Icon} name=${state} />${count(ranks.filter((one) => one.phase === state).length)} ${state}</span>`)}
</span>`;

const MOST_NAMED = 64; // ranks that are shown with the name of their worker
const MOST_CELLS = 2000; // beyond them, ranks that run are left out first

function Ranks({ training, chosen, choose }) {
  const { ranks: all, spares, workers } = training.status;
  const notes = (workers ?? []).filter((worker) => worker.role === "spare" && worker.note).map((worker) => worker.note);
  const unready = (at) => notes[at]; // what a spare that is not ready yet does
  const ranks = all.length <= MOST_CELLS ? all
    : [...all].sort((one, other) => (one.phase === "running") - (other.phase === "running")).slice(0, MOST_CELLS);
  const grid = useRef();
  const fresh = useNewcomers(ranks);
  if (ranks.length === 0 && spares.ready === 0) return html`<p class="quiet">No ranks yet: ${reasonOf(training)}.</p>`;
  const move = (event) => {
    const cells = [...grid.current.querySelectorAll("button")];
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: perLine(cells), ArrowUp: -perLine(cells) }[event.key];
    const next = step && cells[cells.indexOf(document.activeElement) + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
  };
  const named = ranks.length <= MOST_NAMED;
  return html`<div ref=${grid} class=${`ranks ${named ? "named" : ""}`} role="group" aria-label="Ranks" onKeyDown=${move}>
    ${ranks.map((one) => html`<button key=${one.rank} class=${`rank is-${one.phase} ${fresh.has(one.rank) ? "fresh" : ""}`}
        tabindex=${one.rank === (chosen ?? ranks[0].rank) ? 0 : -1} aria-pressed=${one.rank === chosen}
        aria-label=${`Rank ${one.rank}: ${one.phase} on ${one.worker}`} title=${`${one.phase} on ${one.worker}`}
        onClick=${() => choose(one.rank === chosen ? null : one.rank)}>
      <${Icon} name=${one.phase} /><b>${one.rank}</b>${named && html`<i>${shortened(one.worker, training)}</i>`}
    </button>`)}
    ${Array.from({ length: Math.max(spares.ready, spares.target) }, (_, at) => html`<span key=${`spare-${at}`}
        class=${`rank spare ${at < spares.ready ? "" : "missing"}`} role="img"
        aria-label=${at < spares.ready ? "A spare is ready" : unready(at - spares.ready) ?? "A spare is missing"}
        title=${at < spares.ready ? "" : unready(at - spares.ready) ?? ""}>
      <${Icon} name="spare" />${named && html`<i>${at < spares.ready ? "spare" : unready(at - spares.ready) ?? "no spare"}</i>`}</span>`)}
  </div>
  ${ranks.length < all.length && html`<p class="quiet">${count(ranks.length)} of ${plural(all.length, "rank")}, those that do not run first.</p>`}`;
}

/** The name of a worker without that of its training, which is above. */
const shortened = (worker, { metadata }) => worker.startsWith(`${metadata.name}-`) ? `worker ${worker.slice(metadata.name.length + 1)}` : worker;

const perLine = (cells) => cells.filter((cell) => cell.offsetTop === cells[0].offsetTop).length;

/** Ranks that another worker has taken over a moment ago. */
function useNewcomers(ranks) {
  const known = useRef(new Map());
  const since = useRef(new Map());
  for (const { rank, worker } of ranks) {
    if (known.current.has(rank) && known.current.get(rank) !== worker) since.current.set(rank, Date.now());
    known.current.set(rank, worker);
  }
  return new Set([...since.current].filter(([, at]) => Date.now() - at < 15000).map(([rank]) => rank));
}

function Rank({ training, rank, close }) {
  const { metadata, status } = training;
  const one = status.ranks.find((other) => other.rank === rank);
  const exit = (status.rankExits ?? []).find((other) => other.rank === rank);
  return html`<div class="panel" role="region" aria-label=${`Rank ${rank}`}>
    <header><h3>Rank ${rank}</h3><button class="plain" onClick=${close}>Close</button></header>
    ${one && html`<dl class="facts">
      <${Fact} name="State"><span class=${`phase is-${one.phase}`}><${Icon} name=${one.phase} />${one.phase}</span><//>
      <${Fact} name="Worker">${one.worker}<//>
      <${Fact} name="Node">${one.node || "–"}<//>
      <${Fact} name="Round">${count(one.round)}<//>
      <${Fact} name="Step">${count(one.step)}<//>
      <${Fact} name="Started">${moment(one.startedAt)}<//>
    </dl>`}
    <p class="exit">${exit ? exitWords(exit) : "It has not exited."}</p>
    ${exit?.stderrTail.length > 0 && html`<pre class="tail" tabindex="0" role="region" aria-label=${`Last words of rank ${rank}`}>${
      exit.stderrTail.join("\n")}</pre>`}
    <${Log} training=${metadata} rank=${rank} tail=${50} label=${`Log of rank ${rank}`} />
  </div>`;
}

function exitWords({ exitCode, signal, terminationReason, worker, round, finishedAt }) {
  const code = (exitCode ?? null) === null ? "an exit code that nobody saw" : `exit code ${exitCode}`;
  const why = terminationReason === `Exit ${exitCode}` ? "" : `: ${terminationReason}`;
  return `It ended with ${code}${signal ? ` (${signal})` : ""}${why}, on ${worker} in round ${round}, ${moment(finishedAt)}.`;
}

// State -------------------------------------------------------------------------------------------

/** What of its state is safe, and what a loss would cost now. */
function State({ state }) {
  const { step, newestStep, durableStep, memoryBytes, commitSeconds, overhead } = state;
  const known = (value) => (value ?? null) !== null;
  const risky = state.survives === "ranks" || state.survives === "nothing";
  return html`<${Card} title="State" aside=${html`<span class="quiet">${against(state)}</span>`}>
    <dl class="facts">
      <${Fact} name="Safe step">${count(step)} <i>${known(step) && known(state.safeAt) ? since(state.safeAt) : ""}</i><//>
      ${known(newestStep) && newestStep !== step && html`<${Fact} name="In memory">${count(newestStep)}<//>`}
      ${known(durableStep) && html`<${Fact} name="On disk">${count(durableStep)}<//>`}
      ${state.bytes > 0 && html`<${Fact} name="Size">${bytes(state.bytes)}<//>`}
      ${memoryBytes > 0 && html`<${Fact} name="Memory">${bytes(memoryBytes)} <i>at most ${bytes(state.workerMemoryBytes)} each</i><//>`}
      ${known(step) && html`<${Fact} name="Copies">${state.every === 1 ? "each step" : `every ${count(state.every)} steps`} <i>${
        known(commitSeconds) ? duration(commitSeconds) : ""}${known(overhead) ? `, ${Number((overhead * 100).toPrecision(2))} %` : ""}</i><//>`}
    </dl>
    <ul class="conditions">
      ${state.lost && html`<li class="worry"><${Icon} name="lost" /><p>${state.lost}</p></li>`}
      ${state.loss && html`<li class=${risky ? "worry" : ""}><${Icon} name=${risky ? "lost" : "succeeded"} /><p>${state.loss}</p></li>`}
      ${state.where && html`<li><${Icon} name="spare" /><p>${state.where}</p></li>`}
      ${state.resumed && html`<li><${Icon} name="round" /><p>this round went on ${state.resumed}</p></li>`}
      ${state.refused && html`<li class="worry"><${Icon} name="lost" /><p>not all of it is kept: ${state.refused}</p></li>`}
    </ul>
  <//>`;
}
