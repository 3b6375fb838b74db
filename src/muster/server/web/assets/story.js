// Who was there when, and when did it train? Events as rounds, downtime, gates and workers; nothing here draws.
//
// As `muster events -o png` has it, but the journal may begin in the middle: what was there before its first entry
// begins with it. Events do not say who has a seat. A worker trains from the round in which it takes a rank, from its
// first round if it has a rank now or its loss ended a round, and is a spare otherwise.

const ENDS = new Set(["Succeeded", "Failed", "Cancelled"]);
const GATE_OPENS = new Set(["MeshReady", "DegradedMesh"]);
const TAKES = /(\S+) takes rank (\d+)/g;

const timeOf = (event) => Date.parse(typeof event.data?.at === "string" ? event.data.at : event.at);

/** `whole`: the events are all that there are. */
export function storyOf(events, training, nowMs, whole) {
  const dated = events.filter((event) => event.at);
  const story = new Story(dated.length ? timeOf(dated[0]) : nowMs, whole);
  for (const event of dated) story.take(event, timeOf(event));
  return story.told(training, nowMs);
}

class Story {
  constructor(start, whole) {
    this.start = start;
    this.whole = whole;
    this.end = null;
    this.rounds = [];
    this.gates = [];
    this.workers = new Map();
    this.seated = new Map(); // worker → when it took a rank
    this.disturbed = new Set(); // workers whose loss or failure ended a round
  }

  take(event, at) {
    const { reason, message } = event;
    const about = message.split(":")[0];
    if (reason === "RoundReleased") this.begin(event, at);
    else if (reason === "RoundRecalled") this.close(event, at);
    else if (reason === "OutcomeDecided") this.close(event, at);
    else if (reason === "MeshConverging") this.gates.push({ start: at, end: null, why: message });
    else if (GATE_OPENS.has(reason) && this.gates.at(-1)?.end === null) this.gates.at(-1).end = at;
    else if (reason === "WorkerStarted" && event.data?.worker) this.workers.set(event.data.worker, { name: event.data.worker, start: at, end: null });
    else if (reason === "WorkerExited" && event.data?.worker) this.leave(event.data.worker, at, { exitCode: event.data.exitCode });
    else if (reason === "WorkerLost") this.leave(about, at, { lost: true, why: message });
    else if (reason === "RankFailed") this.disturbed.add(event.data?.worker);
    if (ENDS.has(reason)) this.end = Math.max(this.end ?? 0, at);
  }

  begin(event, at) {
    if (this.rounds.at(-1)?.end === null) this.rounds.at(-1).end = at; // it was not said that it was called back
    this.rounds.push({ number: event.round, start: at, end: null, why: event.message });
    for (const [, worker] of event.message.matchAll(TAKES)) if (!this.seated.has(worker)) this.seated.set(worker, at);
  }

  close(event, at) {
    const last = this.rounds.at(-1);
    if (last?.end === null) last.end = at;
    else if (!last && !this.whole) this.rounds.push({ number: event.round, start: this.start, end: at, why: "" });
    const lost = /lost ([^\s:,]+)/.exec(event.message)?.[1];
    if (lost) this.disturbed.add(lost);
  }

  leave(name, at, how) {
    const known = this.workers.get(name) ?? (this.whole ? null : { name, start: this.start, end: null, before: true });
    if (!known) return;
    this.workers.set(name, { ...known, ...how, lost: known.lost || how.lost, end: known.lost ? known.end : at });
  }

  told(training, nowMs) {
    const { status } = training;
    const over = Boolean(status.finishedAt);
    const last = Math.max(...[...this.workers.values()].map((one) => one.end ?? 0));
    const end = over ? Math.max(this.end ?? 0, last, this.start + 1) : Math.max(nowMs, this.start + 1);
    const ranks = new Map(status.ranks.map((one) => [one.worker, one.rank]));
    if (!this.whole) {
      for (const { worker, startedAt } of over ? [] : status.ranks) {
        const start = Math.max(this.start, Date.parse(startedAt) || 0);
        if (!this.workers.has(worker)) this.workers.set(worker, { name: worker, start, end: null, before: true });
      }
      if (this.rounds.length === 0 && status.phase === "ready") {
        this.rounds.push({ number: status.round, start: this.start, end: null, why: "" });
      }
    }
    const shut = (one) => ({ ...one, open: one.end === null && !over, end: one.end ?? end });
    const rounds = this.rounds.map(shut);
    return {
      start: this.start, end, over, rounds, downs: downtimes(rounds, end, over), gates: this.gates.map(shut),
      workers: [...this.workers.values()].map((one) => ({ ...shut(one), rank: ranks.get(one.name) ?? null, trains: this.trainsFrom(one, ranks) })),
    };
  }

  /** When a worker began to train; null for one that only waited. */
  trainsFrom(worker, ranks) {
    const took = this.seated.get(worker.name);
    if (took) return took;
    if (!ranks.has(worker.name) && !this.disturbed.has(worker.name)) return null;
    return worker.before ? worker.start : this.rounds.find((round) => round.start >= worker.start)?.start ?? worker.start;
  }
}

/** Between rounds nobody trains. */
function downtimes(rounds, end, over) {
  const found = [];
  for (let at = 1; at < rounds.length; at++) {
    if (rounds[at].start > rounds[at - 1].end) found.push({ start: rounds[at - 1].end, end: rounds[at].start, before: rounds[at].number });
  }
  const last = rounds.at(-1);
  if (last && !last.open && !over && end > last.end) found.push({ start: last.end, end, open: true, before: null });
  return found;
}
