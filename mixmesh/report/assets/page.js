'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const dark = matchMedia('(prefers-color-scheme: dark)');
const charts = {};
const KINDS = ['computes', 'computes again', 'gradients', 'parameters', 'other communication', 'optimizer'];
const COLOURS = { light: ['#0969da', '#8250df', '#cf222e', '#1a7f37', '#9a6700', '#57606a'],
                  dark: ['#58a6ff', '#bc8cff', '#ff7b72', '#3fb950', '#d29922', '#8b949e'] };
const PARTS = [['ideal', 'ideal'], ['imbalance', 'busiest device above it'], ['exposed', 'waited for, hidden by nothing']];

function seconds(s) {
  if (s === 0) return '0';
  if (s >= 1) return s.toPrecision(3) + ' s';
  return s >= 1e-3 ? (s * 1e3).toPrecision(3) + ' ms' : (s * 1e6).toPrecision(3) + ' us';
}
function bytes(b) {
  for (const unit of ['B', 'KiB', 'MiB', 'GiB']) { if (b < 1024) return +b.toPrecision(3) + ' ' + unit; b /= 1024; }
  return +b.toPrecision(3) + ' TiB';
}
function escaped(text) { return text.replace(/[&<>"]/g, c => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' })[c]); }
function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function colours() { return COLOURS[dark.matches ? 'dark' : 'light']; }
function rankName(r) { return 'rank ' + r + ' ' + data.ranks[r].name; }

function table(id, header, rows) {
  const cells = (tag, row) => row.map((x, n) => `<${tag}${n ? ' class="number"' : ''}>${escaped(String(x))}</${tag}>`).join('');
  document.getElementById(id).innerHTML = `<table><thead><tr>${cells('th', header)}</tr></thead><tbody>` +
    rows.map(row => `<tr>${cells('td', row)}</tr>`).join('') + '</tbody></table>';
}

function common() {
  return { textStyle: { color: style('--text'), fontFamily: 'system-ui, sans-serif' }, animation: false,
    aria: { enabled: true }, color: colours(), backgroundColor: 'transparent',
    tooltip: { backgroundColor: style('--box'), borderColor: style('--line'), textStyle: { color: style('--text') }, confine: true },
    legend: { textStyle: { color: style('--text') }, type: 'scroll', top: 0 } };
}
function axis(extra) {
  return Object.assign({ axisLabel: { color: style('--text') }, axisLine: { lineStyle: { color: style('--line') } },
    splitLine: { lineStyle: { color: style('--line') } }, nameTextStyle: { color: style('--faint') } }, extra);
}
function draw(id, label, option) {
  const place = document.getElementById(id);
  if (charts[id]) charts[id].dispose();
  charts[id] = echarts.init(place, null, { renderer: id === 'timeline' ? 'canvas' : 'svg' });
  charts[id].setOption(Object.assign(common(), option));
  place.setAttribute('aria-label', label);
}
function timeAxis(extra) { return axis(Object.assign({ type: 'value', axisLabel: { color: style('--text'), formatter: seconds, hideOverlap: true } }, extra)); }
function bars(names) { return axis({ type: 'category', data: names, inverse: true, axisLabel: { color: style('--text'), width: 140, overflow: 'truncate' } }); }
const GRID = { left: 8, right: 24, top: 40, bottom: 8, containLabel: true };

function drawParts() {
  draw('parts', 'What a step is made of, for the plan and for data parallelism with equal parts', {
    grid: GRID, xAxis: timeAxis(), yAxis: bars(data.parts.map(p => p.plan)),
    tooltip: Object.assign(common().tooltip, { trigger: 'axis', valueFormatter: seconds }),
    series: PARTS.map(([key, name]) => ({ name, type: 'bar', stack: 'step', data: data.parts.map(p => p[key]), barMaxWidth: 40 })) });
  table('parts-table', ['plan', ...PARTS.map(p => p[1]), 'step'],
    data.parts.map(p => [p.plan, ...PARTS.map(([key]) => seconds(p[key])), seconds(p.ideal + p.imbalance + p.exposed)]));
}
function drawRanks() {
  const names = data.ranks.map((_, r) => rankName(r));
  const tip = formatter => Object.assign(common().tooltip, { trigger: 'axis', valueFormatter: formatter });
  draw('busy', 'Seconds that each device computes, and waits', {
    grid: GRID, xAxis: timeAxis(), yAxis: bars(names), tooltip: tip(seconds),
    series: [{ name: 'computes', type: 'bar', stack: 's', data: data.ranks.map(r => r.computes_s) },
             { name: 'waits', type: 'bar', stack: 's', itemStyle: { color: style('--line') }, data: data.ranks.map(r => Math.max(data.step_s - r.computes_s, 0)) }] });
  const gib = b => b / 2 ** 30;
  draw('memory', 'Peak memory of each device against what it has, in GiB', {
    grid: GRID, xAxis: timeAxis({ axisLabel: { color: style('--text'), formatter: '{value} GiB', hideOverlap: true } }), yAxis: bars(names),
    tooltip: tip(v => bytes(v * 2 ** 30)),
    series: [{ name: 'peak memory', type: 'bar', data: data.ranks.map(r => gib(r.memory_bytes)) },
             { name: 'has', type: 'bar', itemStyle: { color: style('--line') }, data: data.ranks.map(r => gib(r.limit_bytes)) }] });
  table('ranks-table', ['device', 'machine', 'samples', 'micro-batches', 'computes', 'peak memory', 'has'],
    data.ranks.map((r, n) => [rankName(n), r.machine, r.samples, r.micro_batches || 'one', seconds(r.computes_s), bytes(r.memory_bytes), bytes(r.limit_bytes)]));
}
function drawCandidates() {
  const rows = data.candidates;
  document.getElementById('candidates').style.height = 5 + 2 * rows.length + 'rem';
  draw('candidates', 'The step of each plan that was considered and fits', {
    grid: GRID, legend: { show: false }, xAxis: timeAxis(), yAxis: bars(rows.map(r => r[0])),
    tooltip: Object.assign(common().tooltip, { trigger: 'axis', valueFormatter: seconds }),
    series: [{ type: 'bar', data: rows.map(r => ({ value: r[1], itemStyle: { color: r[0] === data.planner ? colours()[0] : colours()[5] } })), barMaxWidth: 24 }] });
  table('candidates-table', ['plan', 'step'], rows.map(r => [r[0] + (r[0] === data.planner ? ' (chosen)' : ''), seconds(r[1])]));
}

// --- the timeline: rows of predicted events above those of measured ones ---------------------------------
function kindOf(name, stream) {
  if (name === 'optimizer') return 5;
  if (stream === 0) return / again( |$)/.test(name) ? 1 : 0;
  if (name.startsWith('gradients of ')) return 2;
  return name.startsWith('parameters of ') || /\.whole/.test(name) ? 3 : 4;
}
function rowsOf(timeline) {
  return timeline.events.map(e => ({ rank: e[0], stream: e[1], name: timeline.names[e[2]], op: timeline.names[e[3]],
    start: e[4] / 1e9, end: (e[4] + e[5]) / 1e9, size: e[6], critical: e[7] === 1 }));
}
const timelines = [['predicted', data.predicted], ['measured', data.measured]].filter(t => t[1]);
const lanes = timelines.map(([name, t]) => ({ name, step_s: t.step_s, events: rowsOf(t) }));
let marked = '';
function waitsFor(lane, event) {
  const before = lane.events.filter(e => Math.abs(e.end - event.start) < 2e-9 && e.start < event.start);
  return before.find(e => e.rank === event.rank) || before[0];
}
function described(lane, e) {
  const before = waitsFor(lane, e);
  return [`${e.name} (${rankName(e.rank)})`, e.op, `${seconds(e.end - e.start)} from ${seconds(e.start)}`,
    e.size >= 0 ? bytes(e.size) : '', e.critical ? 'on the critical path' : '',
    before ? `begins when ${before.name} (rank ${before.rank}) ends` : ''].filter(Boolean);
}
function drawTimeline() {
  const categories = data.ranks.flatMap((_, r) => data.streams.map(s => (s === 'compute' ? rankName(r) : 'rank ' + r + ' links')));
  const place = document.getElementById('timeline');
  const height = 24 * categories.length;
  place.style.height = lanes.length * (height + 56) + 88 + 'px';
  const longest = Math.max(...lanes.map(l => l.step_s));
  const narrow = place.clientWidth < 600;
  const left = narrow ? 96 : 150;
  const grids = [], xs = [], ys = [], series = [];
  lanes.forEach((lane, n) => {
    grids.push({ left, right: 24, top: 48 + n * (height + 56), height });
    xs.push(timeAxis({ gridIndex: n, min: 0, max: longest, name: lane.name, nameLocation: 'middle', nameGap: 24 }));
    ys.push(Object.assign(bars(categories), { gridIndex: n, axisLabel: { color: style('--text'), width: left - 12, overflow: 'truncate', fontSize: 11 } }));
    const kinds = lane.events.map(e => kindOf(e.name, e.stream));
    KINDS.forEach((kind, k) => kinds.includes(k) && series.push({ name: kind, type: 'custom', xAxisIndex: n, yAxisIndex: n, clip: true,
      itemStyle: { color: colours()[k] }, encode: { x: [1, 2], y: 0 },
      data: lane.events.map((e, i) => [2 * e.rank + e.stream, e.start, e.end, i]).filter(row => kinds[row[3]] === k),
      tooltip: { formatter: p => described(lane, lane.events[p.value[3]]).map(escaped).join('<br>') },
      renderItem(params, api) {
        const e = lane.events[api.value(3)], begin = api.coord([e.start, api.value(0)]), end = api.coord([e.end, api.value(0)]);
        const tall = api.size([0, 1])[1] * 0.7;
        const shape = echarts.graphic.clipRectByRect({ x: begin[0], y: begin[1] - tall / 2, width: Math.max(end[0] - begin[0], 0.5), height: tall }, params.coordSys);
        const isMarked = marked && (e.name === marked || e.name.startsWith(marked + ' '));
        return shape && { type: 'rect', shape, style: { fill: colours()[k], opacity: marked && !isMarked ? 0.25 : 1,
          stroke: isMarked || e.critical ? style('--text') : 'none', lineWidth: isMarked ? 2 : 1 } };
      } }));
  });
  draw('timeline', `Timeline of a step on ${data.ranks.length} devices: ${lanes.map(l => l.name + ' ' + seconds(l.step_s)).join(', ')}`, {
    grid: grids, xAxis: xs, yAxis: ys, series, tooltip: Object.assign(common().tooltip, { trigger: 'item' }),
    dataZoom: [{ type: 'inside', xAxisIndex: xs.map((_, n) => n), filterMode: 'weakFilter' },
               { type: 'slider', xAxisIndex: xs.map((_, n) => n), filterMode: 'weakFilter', bottom: 4, height: 20, labelFormatter: v => seconds(Math.max(v, 0)) }] });
  table('path-table', ['event', 'device', 'begins', 'takes'], lanes[0].events.filter(e => e.critical)
    .map(e => [e.name, rankName(e.rank) + (e.stream ? ', links' : ''), seconds(e.start), seconds(e.end - e.start)]));
}
function zoom(begin, end) {
  const width = Math.min(Math.max(end - begin, 0.01), 100), first = Math.min(Math.max(begin, 0), 100 - width);
  charts.timeline.dispatchAction({ type: 'dataZoom', start: first, end: first + width });
}
function shown() { const z = charts.timeline.getOption().dataZoom[0]; return [z.start, z.end]; }
const MOVES = { 'zoom-in': (a, b) => [a + (b - a) / 4, b - (b - a) / 4], 'zoom-out': (a, b) => [a - (b - a) / 2, b + (b - a) / 2],
  left: (a, b) => [a - (b - a) / 2, b - (b - a) / 2], right: (a, b) => [a + (b - a) / 2, b + (b - a) / 2], all: () => [0, 100] };
for (const [id, move] of Object.entries(MOVES)) document.getElementById(id).onclick = () => zoom(...move(...shown()));

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
  const rows = data.program.map(([text, source, name, time_s]) => `<tr><td class="number">${time_s ? seconds(time_s) : ''}</td>` +
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
}

function drawAll() { drawParts(); drawTimeline(); drawRanks(); drawCandidates(); }
drawAll();
drawProgram();
dark.addEventListener('change', drawAll);
let width = innerWidth;
addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
