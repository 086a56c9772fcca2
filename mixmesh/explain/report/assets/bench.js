const select = document.getElementById('figure');
function figureText(x) { return x === null || x === undefined ? '-' : /_s$/.test(select.value) ? seconds(x) : String(+x.toPrecision(4)); }
function drawAll() {
  const figure = select.value;
  draw('bars', `${figure} of ${data.labels.length} rows of ${data.benches.map(b => b.name).join(' and ')}`, {
    grid: { ...GRID, right: 64 }, legend: legend(data.benches.length > 1 ? data.benches.map(b => b.name) : []),
    xAxis: axis({ type: 'value', splitNumber: isNarrow() ? 3 : 6, axisLabel: { color: style('--text'), formatter: figureText, hideOverlap: true } }), yAxis: bars(data.labels),
    tooltip: tip({ trigger: 'axis', valueFormatter: figureText }),
    series: data.benches.map(b => ({ name: b.name, type: 'bar', barMaxWidth: 18, label: { show: data.labels.length <= 40, position: 'right', color: style('--text'), fontSize: 11, formatter: p => figureText(p.value) }, data: b.values[figure] })) },
    barHeight(data.labels, 56));
}
select.onchange = drawAll;
redrawn(drawAll);
