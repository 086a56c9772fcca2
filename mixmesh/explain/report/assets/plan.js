let plan = data.variants[0];
const FIRST_WAIT = data.parts.length - data.waits.length;
const PART_COLOURS = [0, 7, 6, 1, 3, 4, 5, 2];  // so that gradients are the same everywhere
function rankName(r) { return 'rank ' + r + ' ' + plan.ranks[r].name; }
function partColour(n) { return colours()[PART_COLOURS[n]]; }

// an axis that ends with the step has no label there: it could stand on that of the last tick
let wholeTicks;

function drawWaterfall() {
  const rows = plan.waterfall.filter(([, s], n) => !n || s > plan.step_s / 1000);
  const names = [...rows.map(r => r[0]), 'the step'], values = [...rows.map(r => r[1]), plan.step_s];
  const before = values.map((_, n) => (n === rows.length ? 0 : values.slice(0, n).reduce((a, b) => a + b, 0)));
  draw('waterfall', `From the bound to the step of ${plan.name}: ` + names.map((n, i) => `${n} ${seconds(values[i])}`).join(', '), {
    grid: { ...GRID, right: 72 }, xAxis: timeAxis(), yAxis: bars(names),
    tooltip: tip({ trigger: 'item', formatter: p => `${escaped(names[p.dataIndex])}: ${seconds(values[p.dataIndex])}` }),
    series: [{ type: 'bar', stack: 's', silent: true, itemStyle: { color: 'transparent' }, data: before },
             { type: 'bar', stack: 's', barMaxWidth: 24, label: { show: true, position: 'right', color: style('--text'), formatter: p => seconds(p.value) },
               data: values.map((value, n) => ({ value, itemStyle: { color: n === rows.length ? style('--text') : partColour(plan.waterfall.findIndex(w => w[0] === names[n])) } })) }] },
    barHeight(names, 40));
  table('waterfall-table', ['part', 'seconds', 'of the step'], names.map((n, i) => [n, seconds(values[i]), percent(values[i] / plan.step_s)]));
}

function drawRanks() {
  const names = plan.ranks.map((_, r) => rankName(r));
  const waited = data.waits.map((name, k) => ({ name: 'waits for ' + name, colour: partColour(FIRST_WAIT + k), values: plan.ranks.map(r => r.waits_s[k]) }))
    .filter(w => w.values.some(s => s > plan.step_s / 1000));
  const parts = [{ name: 'computes', colour: partColour(0), values: plan.ranks.map(r => r.computes_s) }, ...waited];
  draw('busy', 'Seconds that each device computes, and waits', {
    grid: GRID, legend: legend(parts.map(p => p.name)), xAxis: timeAxis(), yAxis: bars(names), tooltip: tip({ trigger: 'axis', valueFormatter: seconds }),
    series: parts.map(p => ({ name: p.name, type: 'bar', stack: 's', barMaxWidth: 24, itemStyle: { color: p.colour }, data: p.values })) }, barHeight(names));
  const all = plan.ranks.reduce((sum, r) => sum + r.samples, 0);
  table('ranks-table', ['device', 'machine', 'samples', 'share', 'micro-batches', 'computes', ...data.waits.map(w => 'waits for ' + w)],
    plan.ranks.map((r, n) => [rankName(n), r.machine, r.samples, all ? percent(r.samples / all) : '-', r.micro_batches || 'one', seconds(r.computes_s), ...r.waits_s.map(seconds)]), [0, 1]);
}

function drawMemory() {
  const most = Math.max(1, ...plan.ranks.map(r => Math.max(r.peak_bytes, ...r.memory.map(m => m[1])) / r.limit_bytes));
  const names = plan.ranks.map((_, r) => rankName(r));
  draw('memory', 'Share of its memory that each device holds over the step: at most ' + plan.ranks.map((r, n) => `rank ${n} ${percent(r.peak_bytes / r.limit_bytes)}`).join(', '), {
    grid: GRID, legend: legend(names),
    xAxis: timeAxis({ min: 0, max: plan.step_s, axisLabel: wholeTicks }), yAxis: axis({ type: 'value', min: 0, max: Math.ceil(most * 10 + 0.5) / 10, axisLabel: { color: style('--text'), formatter: percent } }),
    tooltip: tip({ trigger: 'axis', formatter: found => seconds(found[0].value[0]) + '<br>' + found.map(p => `${p.marker}${escaped(p.seriesName)}: ${bytes(p.value[1] * plan.ranks[p.seriesIndex].limit_bytes)} (${percent(p.value[1])})`).join('<br>') }),
    series: plan.ranks.map((r, n) => ({ name: names[n], type: 'line', step: 'end', symbol: 'none', lineStyle: { width: 1.5 },
      data: [...r.memory, [plan.step_s, r.memory.length ? r.memory[r.memory.length - 1][1] : 0]].map(([t, b]) => [t, b / r.limit_bytes]),
      markLine: n ? undefined : { silent: true, symbol: 'none', label: { show: false }, lineStyle: { color: style('--text'), type: 'dashed' }, data: [{ yAxis: 1 }] } })) });
  table('memory-table', ['device', 'before the first step', 'largest in all', 'has', 'share'],
    plan.ranks.map((r, n) => [rankName(n), bytes(r.before_bytes), bytes(r.peak_bytes), bytes(r.limit_bytes), percent(r.peak_bytes / r.limit_bytes)]));
}

function drawCandidates() {
  const section = document.getElementById('candidates') && document.getElementById('candidates').parentElement;
  if (!section) return;
  section.hidden = !plan.candidates.length;
  if (section.hidden) return;
  const rows = plan.candidates;
  const title = row => row.name + (row.chosen ? ' (chosen)' : row.fits ? '' : ' (does not fit)');
  const used = data.parts.map((name, n) => ({ name, n })).filter(p => rows.some(r => r.parts && r.parts[p.n] > plan.step_s / 1000));
  const series = used.map(p => ({ name: p.name, type: 'bar', stack: 's', barMaxWidth: 24, itemStyle: { color: partColour(p.n) }, data: rows.map(r => (r.parts ? r.parts[p.n] : 0)) }));
  if (rows.some(r => !r.parts)) series.push({ name: 'step', type: 'bar', stack: 's', barMaxWidth: 24, itemStyle: { color: style('--line') }, data: rows.map(r => (r.parts ? 0 : r.step_s)) });
  draw('candidates', 'The step of each plan that was considered: ' + rows.map(r => `${title(r)} ${seconds(r.step_s)}`).join(', '), {
    grid: GRID, legend: legend(series.map(s => s.name)), xAxis: timeAxis(), yAxis: bars(rows.map(title)),
    tooltip: tip({ trigger: 'axis', valueFormatter: seconds }), series }, barHeight(rows.map(title)));
  table('candidates-table', ['plan', 'step', 'why it was not chosen'], rows.map(r => [title(r), seconds(r.step_s), r.why]), [0, 2]);
}

function drawWhatIf() {
  const rows = data.variants[0].what_if;
  if (!rows.length) return;
  const names = rows.map(r => r[0]);
  draw('what-if', 'Samples per second after each change, as times those now: ' + rows.map(r => `${r[0]} ${r[3].toFixed(2)}`).join(', '), {
    grid: { ...GRID, right: 56 }, xAxis: axis({ type: 'value', axisLabel: { color: style('--text'), formatter: x => x + 'x', hideOverlap: true } }), yAxis: bars(names),
    tooltip: tip({ trigger: 'axis', valueFormatter: x => x.toFixed(2) + 'x the samples per second' }),
    series: [{ type: 'bar', barMaxWidth: 20, z: 6, label: { show: true, position: 'right', color: style('--text'), backgroundColor: style('--ground'), padding: 1, formatter: p => p.value.toFixed(2) + 'x' },
      data: rows.map((r, n) => ({ value: r[3], itemStyle: { color: n ? colours()[0] : colours()[2] } })),
      markLine: { silent: true, symbol: 'none', label: { show: false }, lineStyle: { color: style('--text'), type: 'dashed' }, data: [{ xAxis: 1 }] } }] }, barHeight(names, 48));
  const priced = rows.some(r => r[5] !== null);
  table('what-if-table', ['change', 'step', 'per sample', 'samples/s', 'planned by', ...(priced ? ['a million samples'] : [])],
    rows.map(r => [r[0], seconds(r[1]), seconds(r[2]), r[3].toFixed(2) + 'x', r[4], ...(priced ? [r[5] === null ? '-' : r[5].toFixed(2)] : [])]));
}

// --- the timeline: rows of predicted events above those of measured ones ---------------------------------
const KIND_COLOURS = [0, 1, 2, 3, 4, 5];
// the inverse of report/packing.py
function eventsOf(timeline) {
  const letters = atob(timeline.events), events = [];
  let at = 0;
  function number() {
    let value = 0, scale = 1, byte;
    do { byte = letters.charCodeAt(at++); value += (byte & 127) * scale; scale *= 128; } while (byte > 127);
    return value;
  }
  for (const [rank, stream, count] of timeline.lanes) {
    for (let n = 0, end = 0; n < count; n++) {
      const code = number(), gap = number(), [name, op, size, kind] = timeline.rows[Math.floor(code / 2)];
      const start = end + (gap % 2 ? -(gap + 1) / 2 : gap / 2);
      end = start + number();
      events.push({ rank, stream, name: timeline.names[name], op: timeline.names[op], start: start / 1e9, end: end / 1e9, size, kind, critical: code % 2 === 1 });
    }
  }
  return events;
}
let lanes = [], marked = '';
function takeLanes() {
  lanes = [['predicted', plan.predicted], ['measured', plan.measured]].filter(t => t[1])
    .map(([name, t]) => ({ name, step_s: t.step_s, events: eventsOf(t) }));
}
const near = (a, b) => Math.abs(a - b) < 2e-9;
function waitsFor(lane, event) {
  const before = lane.events.filter(e => near(e.end, event.start) && e.start < event.start);
  return before.find(e => e.rank === event.rank) || before[0];
}
function waitedForBy(lane, event) {
  return lane.events.filter(e => near(e.start, event.end) && e.end > event.end && e !== event);
}
function described(lane, e) {
  const before = waitsFor(lane, e), after = waitedForBy(lane, e);
  return [`${e.name} (${rankName(e.rank)})`, e.op, `${seconds(e.end - e.start)} from ${seconds(e.start)}`,
    e.size >= 0 ? bytes(e.size) : '', data.kinds[e.kind], e.critical ? 'on the critical path' : '',
    before ? `begins when ${before.name} (rank ${before.rank}) ends` : '',
    after.length ? `when it ends ${after[0].name} (rank ${after[0].rank})${after.length > 1 ? ` and ${after.length - 1} more begin` : ' begins'}` : ''].filter(Boolean);
}
function drawTimeline() {
  const left = isNarrow() ? 96 : 170;
  // names of devices where they fit; on a phone they are told by the chart of devices below
  const fits = plan.ranks.every((_, r) => echarts.format.getTextRect(rankName(r), '11px system-ui').width <= left - 14);
  const categories = plan.ranks.flatMap((_, r) => data.streams.map(s => (s === 'compute' ? (fits ? rankName(r) : 'rank ' + r) : 'rank ' + r + ' links')));
  const place = document.getElementById('timeline');
  const row = Math.max(14, Math.min(24, 480 / categories.length)), height = row * categories.length;
  const longest = Math.max(...lanes.map(l => l.step_s));
  const grids = [], xs = [], ys = [], series = [], titles = [];
  lanes.forEach((lane, n) => {
    const top = 32 + n * (height + 80);
    grids.push({ left, right: 24, top, height });
    titles.push({ text: `${lane.name}, ${seconds(lane.step_s)}`, top: top - 26, left: left - 4, textStyle: { fontSize: 13, color: style('--text') } });
    xs.push(timeAxis({ gridIndex: n, min: 0, max: longest, axisLabel: wholeTicks }));
    ys.push(Object.assign(bars(categories), { gridIndex: n, axisLabel: { color: style('--text'), fontSize: 11, interval: 0 } }));
    const kinds = new Set(lane.events.map(e => e.kind));
    data.kinds.forEach((kind, k) => kinds.has(k) && series.push({ name: kind, type: 'custom', xAxisIndex: n, yAxisIndex: n, clip: true, progressive: 0,
      itemStyle: { color: colours()[KIND_COLOURS[k]] }, encode: { x: [1, 2], y: 0 },
      data: lane.events.map((e, i) => [2 * e.rank + e.stream, e.start, e.end, i]).filter(found => lane.events[found[3]].kind === k),
      tooltip: { formatter: p => described(lane, lane.events[p.value[3]]).map(escaped).join('<br>') },
      renderItem(params, api) {
        const e = lane.events[api.value(3)], begin = api.coord([e.start, api.value(0)]), end = api.coord([e.end, api.value(0)]);
        const tall = api.size([0, 1])[1] * 0.7;
        const shape = echarts.graphic.clipRectByRect({ x: begin[0], y: begin[1] - tall / 2, width: Math.max(end[0] - begin[0], 0.5), height: tall }, params.coordSys);
        const isMarked = marked && (e.name === marked || e.name.startsWith(marked + ' '));
        return shape && { type: 'rect', shape, style: { fill: colours()[KIND_COLOURS[k]], opacity: marked && !isMarked ? 0.25 : 1,
          stroke: isMarked || e.critical ? style('--text') : 'none', lineWidth: isMarked ? 2 : 1 } };
      } }));
  });
  draw('timeline', `Timeline of a step of ${plan.name} on ${plan.ranks.length} devices: ${lanes.map(l => l.name + ' ' + seconds(l.step_s)).join(', ')}`, {
    title: titles, grid: grids, xAxis: xs, yAxis: ys, series, legend: legend([...new Set(series.map(s => s.name))]), tooltip: tip({ trigger: 'item' }),
    dataZoom: [{ type: 'inside', xAxisIndex: xs.map((_, n) => n), filterMode: 'weakFilter' },
               { type: 'slider', xAxisIndex: xs.map((_, n) => n), filterMode: 'weakFilter', bottom: 8, height: 18, left, right: 24, showDetail: false }] },
    32 + lanes.length * (height + 80));
  table('path-table', ['event', 'device', 'begins', 'takes'], lanes[0].events.filter(e => e.critical).sort((a, b) => a.start - b.start)
    .map(e => [e.name, rankName(e.rank) + (e.stream ? ', links' : ''), seconds(e.start), seconds(e.end - e.start)]), [0, 1]);
}
function zoom(begin, end) {
  const width = Math.min(Math.max(end - begin, 0.01), 100), first = Math.min(Math.max(begin, 0), 100 - width);
  charts.timeline.dispatchAction({ type: 'dataZoom', start: first, end: first + width });
}
function shown() { const z = charts.timeline.getOption().dataZoom[0]; return [z.start, z.end]; }
const MOVES = { 'zoom-in': (a, b) => [a + (b - a) / 4, b - (b - a) / 4], 'zoom-out': (a, b) => [a - (b - a) / 2, b + (b - a) / 2],
  left: (a, b) => [a - (b - a) / 2, b - (b - a) / 2], right: (a, b) => [a + (b - a) / 2, b + (b - a) / 2], all: () => [0, 100] };
for (const [id, move] of Object.entries(MOVES)) document.getElementById(id).onclick = () => zoom(...move(...shown()));
const KEYS = { '+': 'zoom-in', '-': 'zoom-out', '0': 'all', ArrowLeft: 'left', ArrowRight: 'right' };
document.getElementById('timeline').addEventListener('keydown', event => {
  if (KEYS[event.key]) { zoom(...MOVES[KEYS[event.key]](...shown())); event.preventDefault(); }
});

function pick(name) {
  marked = marked === name ? '' : name;
  const [a, b] = shown();
  drawTimeline();
  const lane = lanes[0], e = lane.events.find(x => x.name === marked || x.name.startsWith(marked + ' '));
  document.getElementById('picked').textContent = marked && e ? described(lane, e).join('; ') : marked ? marked + ' takes no time' : '';
  const longest = Math.max(...lanes.map(l => l.step_s));
  if (marked && e) { const middle = 50 * (e.start + e.end) / longest, wide = Math.max(400 * (e.end - e.start) / longest, 2); zoom(middle - wide / 2, middle + wide / 2);
    document.getElementById('timeline-title').scrollIntoView(); } else zoom(a, b);
}

// --- the program ------------------------------------------------------------------------------------------
function drawProgram() {
  const rows = plan.program.map(([text, source, name, time_s]) => `<tr><td class="number">${time_s ? seconds(time_s) : ''}</td>` +
    `<td>${time_s ? `<button data-name="${escaped(name)}">${escaped(text)}</button>` : escaped(text)}</td><td>${escaped(source)}</td></tr>`);
  const place = document.getElementById('program');
  place.innerHTML = '<table><thead><tr><th class="number">takes</th><th>program</th><th>your line</th></tr></thead><tbody>' + rows.join('') + '</tbody></table>';
  place.onclick = event => { const name = event.target.dataset && event.target.dataset.name; if (name) pick(name); };
  const lines = [...place.querySelectorAll('tbody tr')];
  const search = document.getElementById('search');
  search.oninput = () => {
    const wanted = search.value.toLowerCase();
    let count = 0;
    lines.forEach(line => { const is = line.textContent.toLowerCase().includes(wanted); line.hidden = !is; count += is; });
    document.getElementById('found').textContent = wanted ? `${count} of ${lines.length} lines` : '';
  };
  search.oninput();
}

function drawAll() {
  wholeTicks = { color: style('--text'), formatter: seconds, hideOverlap: true, showMaxLabel: false };
  drawWaterfall(); drawTimeline(); drawRanks(); drawMemory(); drawCandidates(); drawWhatIf();
}
function choose(number) {
  plan = data.variants[number];
  marked = '';
  document.getElementById('picked').textContent = '';
  for (const each of document.querySelectorAll('[data-variant]')) each.hidden = +each.dataset.variant !== number;
  takeLanes();
  drawAll();
  drawProgram();
}
for (const button of document.querySelectorAll('#variants input')) button.onchange = () => choose(+button.value);
takeLanes();
redrawn(drawAll);
drawProgram();
