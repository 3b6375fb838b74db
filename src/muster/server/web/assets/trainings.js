// Which trainings are there, and how are they? One row each; only rows that can be seen exist.

import { rateOf, useLive } from "./live.js";
import { Empty, Phase, World } from "./parts.js";
import { SortChoice, Sorter, directionOf, useOrder } from "./sorting.js";
import { html, useEffect, useRef, useState } from "./html.js";
import { PHASES, count, fullReasonOf, plural, rate, reasonOf, since, stepOf } from "./words.js";

const NARROW = matchMedia("(max-width: 820px)");
const ROW_PX = { wide: 52, narrow: 140 }; // as the style sheet has them
const BEYOND = 6; // rows drawn above and below what is seen, so that the keyboard finds the next one

const NAMES = new Intl.Collator("en", { numeric: true });
const COLUMNS = { // what each sorts by
  Training: ({ metadata }) => metadata.name,
  Phase: ({ status }) => PHASES.indexOf(status.phase),
  World: ({ status }) => status.worldSize.ready,
  Round: ({ status }) => status.round ?? -1,
  Restarts: ({ status }) => status.restarts ?? 0,
  Step: (training) => stepOf(training) ?? -1,
  Age: ({ metadata }) => -Date.parse(metadata.creationTimestamp ?? 0),
  Reason: reasonOf,
};
const NEWEST_FIRST = { column: "Age", down: false };

export function Trainings() {
  const { trainings, loaded } = useLive(1000);
  const [words, setWords] = useState("");
  const [phase, setPhase] = useState("");
  const [order, sort] = useOrder("trainings", NEWEST_FIRST);
  const all = [...trainings.values()];
  const shown = sorted(all.filter((one) => (!phase || one.status.phase === phase) && matches(one, words)), order);
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
      : html`<${SortChoice} columns=${Object.keys(COLUMNS)} order=${order} sort=${sort} />
        <${Rows} trainings=${shown} order=${order} sort=${sort} />`}`;
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

/** In that order, and by name where it leaves a choice. */
function sorted(trainings, order) {
  const key = COLUMNS[order.column] ?? COLUMNS.Age;
  const compare = (one, other) => (typeof one === "string" ? NAMES.compare(one, other) : one - other);
  const keyed = trainings.map((one) => ({ one, key: key(one), name: `${one.metadata.namespace}/${one.metadata.name}` }));
  keyed.sort((one, other) => (order.down ? -1 : 1) * compare(one.key, other.key) || NAMES.compare(one.name, other.name));
  return keyed.map(({ one }) => one);
}

function Rows({ trainings, order, sort }) {
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
      ${Object.keys(COLUMNS).map((name) => html`<span key=${name} role="columnheader" class=${`at-${name.toLowerCase()}`}
        aria-sort=${directionOf(order, name)}><${Sorter} column=${name} order=${order} sort=${sort} /></span>`)}
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
    <span role="cell" class="at-reason" title=${fullReasonOf(training)}>${reason}</span>
  </div>`;
}
