// How is it said? Ages, numbers, reasons and events in words; nothing here draws.

import { now } from "./api.js";

export const PHASES = ["ready", "pending", "failed", "cancelled", "succeeded"];
export const isOver = (training) => ["succeeded", "failed", "cancelled"].includes(training.status.phase);

/** A duration in its two largest units: 45s, 3m20s, 2h5m, 4d1h. */
export function age(ms) {
  const seconds = Math.max(0, Math.floor(ms / 1000));
  for (const [size, below, unit, next] of [[86400, 3600, "d", "h"], [3600, 60, "h", "m"], [60, 1, "m", "s"]]) {
    if (seconds < size) continue;
    const rest = Math.floor((seconds % size) / below);
    return `${Math.floor(seconds / size)}${unit}${rest ? `${rest}${next}` : ""}`;
  }
  return `${seconds}s`;
}

export const since = (time) => (time ? age(now() - Date.parse(time)) : "–");
// Hundreds of these are drawn at once; toLocaleString makes a formatter each time, which takes a tenth of a millisecond.
const MOMENTS = new Intl.DateTimeFormat([], { dateStyle: "medium", timeStyle: "medium", hour12: false });
const NUMBERS = new Intl.NumberFormat("en");
const two = (number) => String(number).padStart(2, "0");

export function clock(time) {
  const at = new Date(time);
  return `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
}

/** To the millisecond, where that matters: 14:03:07.054. */
export const exactly = (time) => `${clock(time)}.${String(new Date(time).getMilliseconds()).padStart(3, "0")}`;
/** How long something took: 54 ms, 1.25 s, then as an age. */
export const took = (ms) => (ms < 60000 ? duration(ms / 1000) : age(ms));
export const moment = (time) => (time ? MOMENTS.format(new Date(time)) : "–");
export const count = (number) => (number ?? null) === null ? "–" : NUMBERS.format(number);
/** A measured value: 0.0312, 1.25, 12,345, 1.2e-7. */
export function number(value) {
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(1);
  return size >= 1000 ? NUMBERS.format(Math.round(value)) : String(Number(value.toPrecision(4)));
}
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;
export const rate = (perS) => (perS === null ? "" : `${perS >= 100 ? Math.round(perS) : perS.toPrecision(2)}/s`);
export const hours = (seconds) => (seconds / 3600).toLocaleString("en", { minimumFractionDigits: 2, maximumFractionDigits: 2 });

export const duration = (seconds) => (seconds < 1 ? `${Number((seconds * 1000).toPrecision(3))} ms` : `${Number(seconds.toPrecision(3))} s`);

export function bytes(number) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (number >= size) return `${(number / size).toFixed(1)} ${unit}`;
  }
  return plural(number, "byte");
}

/** What the newest safe step of a training's state survives. */
export const against = ({ survives }) => ({
  nothing: "nothing is whole in memory", ranks: "survives ranks that fail", worker: "survives the loss of any one worker",
  domain: "survives the loss of any one failure domain",
})[survives] ?? "";

/** How far a training is: the step that all its ranks have reached. */
export function stepOf(training) {
  const steps = training.status.ranks.map((rank) => rank.step).filter((step) => step !== undefined && step !== null);
  return steps.length ? Math.min(...steps) : null;
}

// Conditions that explain why a training is not well, the most telling first, and the status that says so.
const WORRIES = [["Admitted", "False"], ["MeshReady", "False"], ["BelowMinimum", "True"], ["Resizing", "True"],
  ["TargetReached", "False"], ["DegradedMesh", "True"], ["Stalled", "True"]];

export const isWorry = (one) => WORRIES.some(([type, status]) => one.type === type && one.status === status);

const firstLine = (text) => text.trim().split("\n")[0].trim();

/** All that its end has to say: an exception may have many lines. */
export const fullReasonOf = (training) => {
  const { outcome } = training.status;
  return outcome && outcome.state !== "succeeded" && outcome.message ? outcome.message.trim() : reasonOf(training);
};

/** Why it is where it is, in the words of the control plane. */
export function reasonOf(training) {
  const { status, metadata, spec } = training;
  const outcome = status.outcome;
  if (outcome) return outcome.state === "succeeded" ? "every rank exited 0" : firstLine(outcome.message || outcome.reason);
  if (metadata.deletionTimestamp) return "it is being deleted: its workers are being stopped";
  if (spec.cancel) return "cancel was requested: its ranks are being stopped";
  for (const [type, bad] of WORRIES) {
    const found = status.conditions.find((one) => one.type === type && one.status === bad);
    if (found) return found.message || found.reason;
  }
  if (status.phase === "pending") return "the control plane has not looked at it yet";
  return status.conditions.find((one) => one.type === "TargetReached")?.message ?? "";
}

const EVENTS = {
  Created: ["phase", "Submitted"],
  Admitted: ["phase", "Admitted"],
  Queued: ["phase", "Waits in the queue"],
  Ready: ["phase", "Ready"],
  OutcomeDecided: ["phase", "Outcome decided"],
  Succeeded: ["phase", "Succeeded"],
  Failed: ["phase", "Failed"],
  Cancelled: ["phase", "Cancelled"],
  CancelRequested: ["phase", "Cancel requested"],
  DeleteRequested: ["phase", "Delete requested"],
  Edited: ["phase", "Changed"],
  RoundReleased: ["round", "Round begins"],
  RoundRecalled: ["round", "Round called back"],
  RoundRecovered: ["round", "Round taken over"],
  Healed: ["promotion", "Healed"],
  WorkerLost: ["death", "Worker lost"],
  WorkerUnfit: ["death", "Worker unfit"],
  RankFailed: ["death", "Rank failed"],
  StepsStalled: ["death", "No steps"],
  StepsAgain: ["promotion", "Steps come again"],
  WorkerExited: ["death", "Worker exited"],
  ScaleRequested: ["resize", "Scale requested"],
  TargetChanged: ["resize", "Target changed"],
  Resizing: ["resize", "Resizing"],
  TargetReached: ["resize", "Target reached"],
  BelowMinimum: ["resize", "Below its minimum"],
  StateResumed: ["round", "State resumed"],
  StateFellBack: ["round", "Fell back to older state"],
  StateLost: ["death", "Finished steps are lost"],
  StateRefused: ["death", "State is not all kept"],
  StateDamaged: ["death", "State was damaged"],
  MeshConverging: ["phase", "Mesh converges"],
  MeshReady: ["phase", "Mesh ready"],
  DegradedMesh: ["phase", "Mesh degraded"],
  UDTerminalState: ["phase", "Change after the end"],
};

/** The last loss that was made good, while it is news; null if there is none. */
export function lastHeal(events, ms = 600000) {
  const heal = events.findLast((event) => event.reason === "Healed");
  return heal && now() - Date.parse(heal.at) < ms ? heal : null;
}

const spaced = (name) => name.replace(/(?<=[a-z])[A-Z]/g, (letter) => ` ${letter.toLowerCase()}`);

/** An event as one or two entries of the timeline: a promotion stands by itself. */
export function entriesOf(event) {
  const [kind, title] = EVENTS[event.reason] ?? ["other", spaced(event.reason)];
  const entry = { key: `${event.id}`, at: event.at, kind, title, text: event.message, warning: event.type === "Warning" };
  const harmless = event.reason === "WorkerExited" && event.data?.exitCode === 0;
  const shown = harmless ? { ...entry, kind: "other", warning: false } : entry;
  const promoted = [...event.message.matchAll(/(\S+) takes rank (\d+)/g)];
  return [shown, ...promoted.map(([, worker, rank]) => ({
    ...entry, key: `${event.id}-${rank}`, kind: "promotion", title: "Spare promoted", text: `${worker} takes rank ${rank}`,
  }))];
}
