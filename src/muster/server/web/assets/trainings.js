// Which trainings are there, and how are they? One row each; only rows that can be seen exist.

import { rateOf, useLive } from "./live.js";
import { Empty, Phase, World } from "./parts.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { PHASES, count, plural, rate, reasonOf, since, stepOf } from "./words.js";

const NARROW = matchMedia("(max-width: 820px)");
const ROW_PX = { wide: 52, narrow: 140 }; // as the style sheet has them
const BEYOND = 6; // rows drawn above and below what is seen, so that the keyboard finds the next one

const NAMES = new Intl.Collator("en", { numeric: true });
const COLUMNS = ["Training", "Phase", "World", "Round", "Restarts", "Step", "Age", "Reason"];

export function Trainings() {
  const { trainings, loaded } = useLive(1000);
  const [words, setWords] = useState("");
  const [phase, setPhase] = useState("");
  const all = [...trainings.values()];
  const shown = all.filter((one) => (!phase || one.status.phase === phase) && matches(one, words)).sort(inOrder);
  const phases = PHASES.filter((name) => all.some((one) => one.status.phase === name));
  return html`
    <div class="heading">
      <h1 tabindex="-1">Trainings</h1>
      ${all.length > 0 && html`<div class="filters">
        <div class="chips" role="group" aria-label="Only this phase">
          <button aria-pressed=${phase === ""} onClick=${() => setPhase("")}>All <i>${count(all.length)}</i></button>
          ${phases.map((name) => html`<button key=${name} aria-pressed=${phase === name} onClick=${() => setPhase(name)}>
            ${name} <i>${count(all.filter((one) => one.status.phase === name).length)}</i></button>`)}
        </div>
        <input type="search" placeholder="Find by name or reason" aria-label="Find by name or reason"
          value=${words} onInput=${(event) => setWords(event.target.value)} />
      </div>`}
    </div>
    ${!loaded ? html`<p class="quiet">Loading trainings…</p>`
      : all.length === 0 ? html`<${Nothing} />`
      : shown.length === 0 ? html`<${Empty} title="No training matches"><p>Of ${plural(all.length, "training")}, none is like that.</p><//>`
      : html`<${Rows} trainings=${shown} />`}`;
}

const Nothing = () => html`<${Empty} title="No trainings yet">
  <p>Put <code>muster run</code> in front of a script. It appears here at once.</p>
  <pre>muster run train.py --name first --workers 2 --spares 1</pre>
<//>`;

function matches(training, words) {
  if (!words) return true;
  const { name, namespace } = training.metadata;
  const text = `${namespace}/${name} ${reasonOf(training)}`.toLowerCase();
  return words.toLowerCase().split(/\s+/).every((word) => text.includes(word));
}

function inOrder(one, other) {
  const place = (training) => Math.min(PHASES.indexOf(training.status.phase), 2); // what is over comes last, as one
  const key = (training) => `${training.metadata.namespace}/${training.metadata.name}`;
  return place(one) - place(other) || NAMES.compare(key(one), key(other));
}

function Rows({ trainings }) {
  const body = useRef();
  const [[first, last], setSeen] = useState([0, 30]);
  const [narrow, setNarrow] = useState(NARROW.matches);
  const height = narrow ? ROW_PX.narrow : ROW_PX.wide;
  useEffect(() => {
    const look = () => {
      if (!body.current) return; // the view has just been left
      const above = -body.current.getBoundingClientRect().top;
      const from = Math.max(0, Math.floor(above / height) - BEYOND);
      const to = Math.ceil((above + innerHeight) / height) + BEYOND;
      setSeen(([a, b]) => (a === from && b === to ? [a, b] : [from, to]));
    };
    const turn = () => setNarrow(NARROW.matches);
    look();
    addEventListener("scroll", look, { passive: true });
    addEventListener("resize", look);
    NARROW.addEventListener("change", turn);
    return () => {
      removeEventListener("scroll", look);
      removeEventListener("resize", look);
      NARROW.removeEventListener("change", turn);
    };
  }, [height]);
  return html`<div class="table" role="table" aria-label="Trainings" aria-rowcount=${trainings.length + 1}>
    <div class="row head" role="row" aria-rowindex="1">
      ${COLUMNS.map((name) => html`<span key=${name} role="columnheader" class=${`at-${name.toLowerCase()}`}>${name}</span>`)}
    </div>
    <div ref=${body} class="rows" role="rowgroup" style=${{ height: `${trainings.length * height}px` }}>
      ${trainings.slice(first, last).map((one, at) =>
        html`<${Row} key=${one.metadata.uid} training=${one} index=${first + at + 2} top=${(first + at) * height} />`)}
    </div>
  </div>`;
}

export const addressOf = ({ namespace, name }) => `#/trainings/${encodeURIComponent(namespace)}/${encodeURIComponent(name)}`;

function Row({ training, index, top }) {
  const { metadata, status } = training;
  const reason = reasonOf(training);
  const address = addressOf(metadata);
  const open = (event) => event.target.closest("a") || getSelection().toString() || (location.hash = address);
  return html`<div class="row" role="row" aria-rowindex=${index} style=${{ top: `${top}px` }} onClick=${open}>
    <span role="cell" class="at-training"><a href=${address}>${metadata.name}</a>
      <i>${metadata.namespace}</i></span>
    <span role="cell" class="at-phase"><${Phase} name=${status.phase} /></span>
    <span role="cell" class="at-world"><${World} training=${training} /></span>
    <span role="cell" class="at-round"><i class="label">round </i>${count(status.round)}</span>
    <span role="cell" class="at-restarts"><i class="label">restarts </i>${count(status.restarts)}</span>
    <span role="cell" class="at-step"><i class="label">step </i>${count(stepOf(training))}<i>${rate(rateOf(metadata.uid))}</i></span>
    <span role="cell" class="at-age">${since(metadata.creationTimestamp)}</span>
    <span role="cell" class="at-reason" title=${reason}>${reason}</span>
  </div>`;
}
