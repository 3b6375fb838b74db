// What was used? GPU-hours of every training and namespace.

import { ask } from "./api.js";
import { useLive, useRepeated } from "./live.js";
import { Card, Empty } from "./parts.js";
import { Sorter, directionOf, useOrder } from "./sorting.js";
import { addressOf } from "./trainings.js";
import { html, useState } from "./html.js";
import { count, hours } from "./words.js";

const DAY_MS = 86400000;
const PERIODS = [["", "All time"], ["1", "Last 24 hours"], ["7", "Last 7 days"], ["30", "Last 30 days"]];
const MOST_ROWS = 200;

export function UsagePage() {
  const { trainings: live, loaded } = useLive();
  const [days, setDays] = useState("");
  const [found, set] = useState(null);
  useRepeated(async (signal) => {
    const since = days ? `&since=${new Date(Date.now() - days * DAY_MS).toISOString()}` : "";
    const [trainings, spaces] = await Promise.all(["training", "namespace"].map((by) => ask(`/v1/usage?by=${by}${since}`, { signal })));
    set({ trainings: trainings.items, spaces: spaces.items });
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
          <${Sums} title="By training" items=${found.trainings} name=${linkedIn(loaded ? live : null)} />`}`;
}

const COLUMNS = { // what each sorts by
  Name: (one) => one.pipeline ?? (one.training || one.namespace || ""),
  "GPU-hours": (one) => one.gpuSeconds, "Worker-hours": (one) => one.workerSeconds, Workers: (one) => one.workers,
  Running: (one) => one.running, Cost: (one) => one.cost ?? -1,
};
const MOST_FIRST = { column: "GPU-hours", down: true };

function sorted(items, order) {
  const key = COLUMNS[order.column] ?? COLUMNS["GPU-hours"];
  const compare = (one, other) => (typeof one === "string" ? one.localeCompare(other, "en", { numeric: true }) : one - other);
  return [...items].sort((one, other) => (order.down ? -1 : 1) * compare(key(one), key(other)) || other.workerSeconds - one.workerSeconds);
}

/** A training links to its page if the control plane still has it; another training of the same name is not it. */
const linkedIn = (live) => (one) => one.pipeline ? html`${one.pipeline}<i>pipeline${one.training && ` of ${one.namespace}/${one.training}`}</i>`
  : live && one.uid && ![...live.values()].some(({ metadata }) => metadata.uid === one.uid)
    ? html`${one.training}<i>${one.namespace}, deleted</i>`
    : html`<a href=${addressOf({ namespace: one.namespace, name: one.training })}>${one.training}</a><i>${one.namespace}</i>`;

function Sums({ title, items, name }) {
  const [order, sort] = useOrder(`usage-${title}`, MOST_FIRST);
  const head = (column, kind = "number") => html`<th scope="col" class=${kind} aria-sort=${directionOf(order, column)}><${Sorter}
    column=${column} order=${order} sort=${sort} /></th>`;
  const measure = items.some((one) => one.gpuSeconds > 0) ? "gpuSeconds" : "workerSeconds"; // where nobody asks for GPUs
  const most = Math.max(...items.map((one) => one[measure])) || 1;
  const costs = items.some((one) => (one.cost ?? null) !== null);
  return html`<${Card} title=${title}><div class="scroll" tabindex="0" role="region" aria-label=${`${title}, as a table`}><table>
    <thead><tr>${head("Name", "")}${head("GPU-hours")}<td class="share" />
      ${head("Worker-hours")}${head("Workers", "number workers")}${head("Running")}${costs && head("Cost")}</tr></thead>
    <tbody>${sorted(items, order).slice(0, MOST_ROWS).map((one) => html`<tr key=${`${one.uid || one.namespace} ${one.pipeline ?? ""}`}>
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
