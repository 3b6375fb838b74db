// What was used? GPU-hours of every training and namespace.

import { ask } from "./api.js";
import { useLive, useRepeated } from "./live.js";
import { Card, Empty } from "./parts.js";
import { addressOf } from "./trainings.js";
import { html, useState } from "./html.js";
import { count, hours } from "./words.js";

const DAY_MS = 86400000;
const PERIODS = [["", "All time"], ["1", "Last 24 hours"], ["7", "Last 7 days"], ["30", "Last 30 days"]];
const MOST_ROWS = 200;

export function UsagePage() {
  useLive();
  const [days, setDays] = useState("");
  const [found, set] = useState(null);
  useRepeated(async (signal) => {
    const since = days ? `&since=${new Date(Date.now() - days * DAY_MS).toISOString()}` : "";
    const [trainings, spaces] = await Promise.all(["training", "namespace"].map((by) => ask(`/v1/usage?by=${by}${since}`, { signal })));
    set({ trainings: trainings.items.sort(byMost), spaces: spaces.items.sort(byMost) });
  }, 5000, days);
  return html`
    <div class="heading"><h1 tabindex="-1">Usage</h1>
      <select aria-label="Period" value=${days} onChange=${(event) => setDays(event.target.value)}>
        ${PERIODS.map(([value, words]) => html`<option key=${value} value=${value}>${words}</option>`)}
      </select>
    </div>
    ${found === null ? html`<p class="quiet">Loading…</p>`
      : found.trainings.length === 0 ? html`<${Empty} title="Nothing was used">
          <p>Every worker counts from its start to its exit. Start some, and ask for GPUs:</p>
          <pre>muster run train.py --workers 2 --gpus 1</pre><//>`
      : html`<${Sums} title="By namespace" items=${found.spaces} name=${(one) => one.namespace || "of no namespace"} />
          <${Sums} title="By training" items=${found.trainings} name=${linked} />`}`;
}

const byMost = (one, other) => other.gpuSeconds - one.gpuSeconds || other.workerSeconds - one.workerSeconds;

const linked = (one) => one.pipeline ? html`${one.pipeline}<i>pipeline${one.training && ` of ${one.namespace}/${one.training}`}</i>`
  : html`<a href=${addressOf({ namespace: one.namespace, name: one.training })}>${one.training}</a><i>${one.namespace}</i>`;

function Sums({ title, items, name }) {
  const measure = items.some((one) => one.gpuSeconds > 0) ? "gpuSeconds" : "workerSeconds"; // where nobody asks for GPUs
  const most = Math.max(...items.map((one) => one[measure])) || 1;
  const costs = items.some((one) => (one.cost ?? null) !== null);
  return html`<${Card} title=${title}><div class="scroll" tabindex="0" role="region" aria-label=${title}><table>
    <thead><tr><th>Name</th><th class="number">GPU-hours</th><td class="share" />
      <th class="number">Worker-hours</th><th class="number workers">Workers</th><th class="number">Running</th>${
        costs && html`<th class="number">Cost</th>`}</tr></thead>
    <tbody>${items.slice(0, MOST_ROWS).map((one) => html`<tr key=${`${one.uid || one.namespace} ${one.pipeline ?? ""}`}>
      <th scope="row">${name(one)}</th>
      <td class="number">${hours(one.gpuSeconds)}</td>
      <td class="share"><span class="meter"><b style=${{ width: `${(100 * one[measure]) / most}%` }} /></span></td>
      <td class="number">${hours(one.workerSeconds)}</td>
      <td class="number workers">${count(one.workers)}</td>
      <td class="number">${count(one.running)}</td>
      ${costs && html`<td class="number">${one.cost?.toFixed(2) ?? "–"}</td>`}
    </tr>`)}</tbody>
  </table></div>
  ${items.length > MOST_ROWS && html`<p class="quiet">And ${count(items.length - MOST_ROWS)} more; <code>muster usage</code> lists all.</p>`}
  <//>`;
}
