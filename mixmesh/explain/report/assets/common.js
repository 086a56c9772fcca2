'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const dark = matchMedia('(prefers-color-scheme: dark)');
const charts = {};

function seconds(s) {
  if (s === null || s === undefined) return '-';
  if (s === 0) return '0';
  const sign = s < 0 ? '-' : '', a = Math.abs(s);
  if (a >= 1) return sign + +a.toPrecision(3) + ' s';
  return sign + (a >= 1e-3 ? +(a * 1e3).toPrecision(3) + ' ms' : +(a * 1e6).toPrecision(3) + ' us');
}
function bytes(b) {
  for (const unit of ['B', 'KiB', 'MiB', 'GiB']) { if (b < 1000) return +b.toPrecision(3) + ' ' + unit; b /= 1024; }
  return +b.toPrecision(3) + ' TiB';
}
function percent(x) { return Math.round(100 * x) + ' %'; }
function escaped(text) { return text.replace(/[&<>"]/g, c => ({ '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' })[c]); }
function style(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function colours() { return [1, 2, 3, 4, 5, 6, 7, 8].map(n => style('--series-' + n)); }
function isNarrow() { return innerWidth < 600; }

// columns named in `words` hold text
function table(id, header, rows, words = [0]) {
  const kind = n => (words.includes(n) ? (n ? ' class="words"' : '') : ' class="number"');
  const cells = (tag, row) => row.map((x, n) => `<${tag}${kind(n)}>${escaped(String(x))}</${tag}>`).join('');
  document.getElementById(id).innerHTML = `<table><thead><tr>${cells('th', header)}</tr></thead><tbody>` +
    rows.map(row => `<tr>${cells('td', row)}</tr>`).join('') + '</tbody></table>';
}
function tip(extra) {
  return Object.assign({ backgroundColor: style('--box'), borderColor: style('--line'), textStyle: { color: style('--text') }, confine: true }, extra);
}
function axis(extra) {
  return Object.assign({ axisLabel: { color: style('--text'), hideOverlap: true }, axisLine: { lineStyle: { color: style('--line') } },
    splitLine: { lineStyle: { color: style('--line') } }, nameTextStyle: { color: style('--faint') } }, extra);
}
function timeAxis(extra) { return axis(Object.assign({ type: 'value', splitNumber: isNarrow() ? 3 : 5, axisLabel: { color: style('--text'), formatter: seconds, hideOverlap: true } }, extra)); }
function bars(names) {
  const width = isNarrow() ? 120 : 220;
  return axis({ type: 'category', data: names, inverse: true, axisLabel: { color: style('--text'), width, overflow: 'break', interval: 0, lineHeight: 14, fontSize: 12 } });
}
const GRID = { left: 8, right: 24, top: 12, bottom: 8, containLabel: true };
// the keys of a chart are buttons above it: they wrap where they do not fit, and hide or show what they name
function legend(names) { return { show: false, data: names }; }
function drawKeys(id, option) {
  const chart = document.getElementById(id), names = option.legend ? option.legend.data : [];
  let place = document.getElementById(id + '-keys');
  if (!place) {
    chart.insertAdjacentHTML('beforebegin', `<p class="keys" id="${id}-keys"></p>`);
    place = document.getElementById(id + '-keys');
  }
  const colourOf = (s, n) => (s.itemStyle && s.itemStyle.color) || (s.lineStyle && s.lineStyle.color) || colours()[n % 8];
  place.innerHTML = names.map(name => {
    const n = option.series.findIndex(s => s.name === name), dotted = (option.series[n].lineStyle || {}).type === 'dotted';
    return `<button aria-pressed="true"><span class="swatch${dotted ? ' dotted' : ''}" style="border-color:${colourOf(option.series[n], n)}"></span>${escaped(name)}</button>`;
  }).join('');
  [...place.children].forEach((button, n) => (button.onclick = () => {
    const shows = button.getAttribute('aria-pressed') !== 'true';
    button.setAttribute('aria-pressed', String(shows));
    charts[id].dispatchAction({ type: shows ? 'legendSelect' : 'legendUnSelect', name: names[n] });
  }));
}
function draw(id, label, option, height) {
  const place = document.getElementById(id);
  if (height) place.style.height = height + 'px';
  if (charts[id]) charts[id].dispose();
  charts[id] = echarts.init(place, null, { renderer: id === 'timeline' ? 'canvas' : 'svg' });
  charts[id].setOption(Object.assign({ textStyle: { color: style('--text'), fontFamily: 'system-ui, sans-serif' }, animation: false,
    aria: { enabled: true }, color: colours(), backgroundColor: 'transparent', tooltip: tip() }, option));
  place.setAttribute('aria-label', label);
  drawKeys(id, option);
}
// rows of bars: as high as their names are long
function barHeight(names, top = 56) {
  const letters = isNarrow() ? 16 : 32;
  return top + names.length * Math.max(isNarrow() ? 36 : 32, ...names.map(name => 8 + 15 * Math.ceil(name.length / letters)));
}

function redrawn(drawAll) {
  drawAll();
  dark.addEventListener('change', drawAll);
  let width = innerWidth;
  addEventListener('resize', () => { if (innerWidth !== width) { width = innerWidth; drawAll(); } });
}
