// What do all views draw with? Icons, the phase of a training, the bar of its world, dialogs, empty states.

import { html, useEffect, useRef, useState } from "./html.js";
import { count, isOver } from "./words.js";

const SHAPES = {
  ready: "M5 3.5v9l7.5-4.5z",
  running: "M5 3.5v9l7.5-4.5z",
  pending: "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11zM8 5v3.2l2.2 1.6",
  starting: "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11zM8 5v3.2l2.2 1.6",
  stopping: "M4 4h8v8H4z",
  succeeded: "M3 8.5l3.2 3.2L13 4.8",
  failed: "M4 4l8 8M12 4l-8 8",
  lost: "M8 2.5L14 13H2zM8 6.5v3M8 11.2v.3",
  cancelled: "M8 2.5a5.5 5.5 0 1 0 0 11 5.5 5.5 0 0 0 0-11zM4.2 11.8l7.6-7.6",
  spare: "M8 4a4 4 0 1 0 0 8 4 4 0 0 0 0-8z",
  phase: "M4 14V2.5h8l-2 3 2 3H4",
  round: "M13 8a5 5 0 1 1-1.6-3.7M13 2v3h-3",
  death: "M8 2.5L14 13H2zM8 6.5v3M8 11.2v.3",
  promotion: "M8 13V3M3.5 7.5L8 3l4.5 4.5",
  resize: "M2 8h12M5 5L2 8l3 3M11 5l3 3-3 3",
  other: "M8 6.5a1.5 1.5 0 1 0 0 3 1.5 1.5 0 0 0 0-3z",
  theme: "M8 2.5a5.5 5.5 0 1 0 0 11zM8 2.5a5.5 5.5 0 0 1 0 11",
};
const FILLED = new Set(["ready", "running", "stopping"]);

export const Icon = ({ name }) => html`
  <svg class=${`icon ${FILLED.has(name) ? "filled" : ""}`} viewBox="0 0 16 16" aria-hidden="true">
    <path d=${SHAPES[name] ?? SHAPES.other} />
  </svg>`;

export const Phase = ({ name }) => html`<span class=${`phase is-${name}`}><${Icon} name=${name} />${name}</span>`;

const MOST_CELLS = 12;
const MOST_SPARES = 4;

/** Ready and target between min and max; spares are hollow. Its words say the same to those who cannot see it. */
export function World({ training }) {
  const { worldSize: world, spares } = training.status;
  const asked = training.spec.worldSize;
  const [target, min, max] = [asked.target, asked.min, asked.max];
  if (isOver(training)) return html`<span class="world" title="no worker is expected any more"><span class="numbers">–</span></span>`;
  const words = `${world.ready} of ${target} worker${target === 1 ? "" : "s"} ready, ${min} to ${max} allowed` +
    (spares.target || spares.ready ? `, ${spares.ready} of ${spares.target} spares ready` : "");
  const cells = Array.from({ length: Math.max(max, world.ready) }, (_, at) =>
    `${at < world.ready ? "full" : at < target ? "wanted" : ""} ${at === min - 1 && min < max ? "min" : ""}`);
  const share = (number) => `${(100 * number) / Math.max(max, world.ready)}%`;
  return html`<span class="world" role="img" aria-label=${words} title=${words}>
    <span class="numbers">${count(world.ready)}<i>/${count(target)}</i></span>
    ${cells.length <= MOST_CELLS
      ? html`<span class="cells">${cells.map((kind) => html`<b class=${kind} />`)}</span>`
      : html`<span class="bar">
          <b class="wanted" style=${{ width: share(target) }} /><b class="full" style=${{ width: share(world.ready) }} />
          <b class="min" style=${{ left: share(min) }} />
        </span>`}
    ${spares.target > 0 && html`<span class="spares">
      ${Array.from({ length: Math.min(spares.target, MOST_SPARES) }, (_, at) =>
        html`<b class=${at < spares.ready ? "" : "missing"} />`)}
      ${spares.target > MOST_SPARES && html`<i>+${spares.target - MOST_SPARES}</i>`}
    </span>`}
  </span>`;
}

export const Empty = ({ title, children }) => html`<div class="empty"><h2>${title}</h2>${children}</div>`;

export const Fact = ({ name, children }) => html`<div class="fact"><dt>${name}</dt><dd>${children}</dd></div>`;

export const Card = ({ title, aside, children, kind = "" }) => html`
  <section class=${`card ${kind}`} aria-label=${title}>
    <header><h2>${title}</h2>${aside}</header>
    ${children}
  </section>`;

/** A question with an answer that does something. It closes when that has worked, and says why when it has not. */
export function Dialog({ title, action, aside, kind = "", keep = "Close", run, close, children }) {
  const box = useRef();
  const [busy, setBusy] = useState(false);
  const [refusal, setRefusal] = useState(null);
  useEffect(() => box.current.showModal(), []);
  const dismiss = () => {
    box.current.close(); // gives the focus back; its event comes later, when another dialog may be open
    close();
  };
  const escape = (event) => {
    event.preventDefault();
    dismiss();
  };
  const submit = async (event) => {
    event.preventDefault();
    setBusy(true);
    try {
      await run();
      dismiss();
    } catch (error) {
      setRefusal(error);
      setBusy(false);
    }
  };
  return html`<dialog ref=${box} class=${kind === "wide" ? "wide" : ""} onCancel=${escape} aria-labelledby="dialog-title">
    <form onSubmit=${submit}>
      <h2 id="dialog-title">${title}</h2>
      ${children}
      ${refusal && html`<p class="problem" role="alert">${refusal.message}${refusal.hint && html`<br /><small>${refusal.hint}</small>`}</p>`}
      <footer>
        ${aside}<button type="button" onClick=${dismiss}>${keep}</button>
        ${action && html`<button class=${`primary ${kind}`} disabled=${busy}>${action}</button>`}
      </footer>
    </form>
  </dialog>`;
}
