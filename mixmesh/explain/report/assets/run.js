const MARK_COLOURS = { start: 2, fault: 3, plan: 6, shares: 5, checkpoint: 4, stop: 7 };

function markLines(run, kinds) {
  return { symbol: 'none', silent: false, label: { show: false },
    data: run.marks.filter(m => kinds.includes(m[0])).map(([event, step]) => ({ xAxis: step, name: data.names[event],
      lineStyle: { color: colours()[MARK_COLOURS[event]], type: event === 'checkpoint' ? 'dotted' : 'solid', width: event === 'fault' ? 3 : 1.5 } })),
    tooltip: { formatter: p => `${p.name} after step ${p.value}` } };
}
// marks are listed in the legend by series without points
function markSeries(kinds) {
  return kinds.map(kind => ({ name: data.names[kind], type: 'line', data: [], symbol: 'none',
    lineStyle: { color: colours()[MARK_COLOURS[kind]], type: kind === 'checkpoint' ? 'dotted' : 'solid' }, itemStyle: { color: colours()[MARK_COLOURS[kind]] } }));
}
function course(id, label, column, format, smallest) {
  const kinds = Object.keys(data.names).filter(k => data.runs.some(r => r.marks.some(m => m[0] === k)));
  const series = data.runs.map((run, n) => ({ name: run.name, type: 'line', symbol: 'none', sampling: 'lttb', lineStyle: { width: 1.5 }, itemStyle: { color: colours()[n] },
    data: run.points.map(p => [p[0], p[column]]), markLine: markLines(run, kinds) }));
  const all = [...series, ...markSeries(kinds)];
  draw(id, label, { grid: { ...GRID, bottom: 28 }, legend: legend(all.map(s => s.name)),
    xAxis: axis({ type: 'value', name: 'step', nameLocation: 'middle', nameGap: 26, min: 'dataMin', max: 'dataMax', splitNumber: isNarrow() ? 4 : 8 }),
    yAxis: axis({ type: 'value', scale: true, min: smallest, axisLabel: { color: style('--text'), formatter: format } }),
    tooltip: tip({ trigger: 'axis', valueFormatter: x => (x === null || x === undefined ? '-' : format(x)) }),
    dataZoom: [{ type: 'inside', filterMode: 'none' }], series: all });
}
function plain(x) { return String(+Number(x).toPrecision(4)); }
function drawLags() {
  if (!document.getElementById('lags')) return;
  const series = data.runs.flatMap(run => {
    const count = Math.max(0, ...run.own.map(o => o[1].length));
    return Array.from({ length: count }, (_, r) => ({ name: (data.runs.length > 1 ? run.name + ' ' : '') + 'rank ' + r, type: 'line', symbolSize: 5,
      data: run.own.filter(o => o[1].length > r).map(o => [o[0], o[1][r]]) }));
  });
  draw('lags', 'Seconds of a step in which each rank waits for nobody', { grid: { ...GRID, bottom: 28 }, legend: legend(series.map(s => s.name)),
    xAxis: axis({ type: 'value', name: 'step', nameLocation: 'middle', nameGap: 26, scale: true }), yAxis: timeAxis({ min: 0 }),
    tooltip: tip({ trigger: 'axis', valueFormatter: seconds }), series });
}
function drawAll() {
  course('loss', 'Loss over steps of ' + data.runs.map(r => r.name).join(' and '), 1, plain);
  const sampled = data.runs.every(r => r.points.some(p => p[2] !== null));
  course('speed', sampled ? 'Samples per second over steps' : 'Seconds of each step', sampled ? 2 : 3, sampled ? x => plain(x) + ' /s' : seconds, 0);
  drawLags();
}
redrawn(drawAll);
