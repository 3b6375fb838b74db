// What happened, and why? Entries of the journal in words, the newest first.

import { Card, Icon } from "./parts.js";
import { html, useState } from "./html.js";
import { entriesOf, exactly, moment } from "./words.js";

const ENTRIES = 60;

export function Timeline({ journal }) {
  const [all, setAll] = useState(false);
  const [most, setMost] = useState(ENTRIES);
  const entries = newestOf(journal.events, most + 1, all);
  const rest = entries.length > most;
  const older = () => {
    setMost(most * 4);
    if (!rest) journal.more();
  };
  return html`<${Card} title="Timeline" aside=${html`<label><input type="checkbox" checked=${all}
      onChange=${(event) => setAll(event.target.checked)} /> Everything</label>`}>
    <div class="timeline" tabindex="0" role="region" aria-label="Entries, the newest first">
      <ol aria-live="polite" aria-relevant="additions">
      ${entries.slice(0, most).map((one) => html`<li key=${one.key} class=${`of-${one.kind} ${one.warning ? "worry" : ""}`}>
        <span class="dot"><${Icon} name=${one.kind} /></span>
        <div><b>${one.title}</b> <time datetime=${one.at} title=${moment(one.at)}>${exactly(one.at)}</time><p>${one.text}</p></div>
      </li>`)}
      </ol>
    </div>
    ${(rest || journal.older) && html`<button class="plain" onClick=${older}>Show older</button>`}
    ${entries.length === 0 && journal.loaded && html`<p class="quiet">Nothing has happened yet.</p>`}
  <//>`;
}

/** The newest entries, of no more events than that takes. */
function newestOf(events, most, all) {
  const found = [];
  for (let at = events.length - 1; at >= 0 && found.length < most; at--) {
    found.push(...entriesOf(events[at]).filter((one) => all || one.warning || one.kind !== "other").reverse());
  }
  return found;
}
