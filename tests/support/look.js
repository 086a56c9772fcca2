// What is wrong with a page as it stands, as a list of sentences: what is cut off, overlaps or cannot be read.
// Texts of charts are looked at where the charts' own library (zrender, below ECharts) placed them: on a canvas
// there are no elements to ask.
(() => {
  const wrong = [];
  const SLACK = 2;  // pixels: rounding, and letters that are narrower than their boxes
  const root = document.documentElement;
  // a site's drawer waits beyond the edge until it is called
  function isAway(e) {
    const drawer = e.closest('.sidebar-drawer, .toc-drawer'), box = drawer && drawer.getBoundingClientRect();
    return drawer !== null && (box.left >= innerWidth || box.right <= 0);
  }
  const isShown = e => e.checkVisibility({ visibilityProperty: true, opacityProperty: true }) && e.getClientRects().length > 0 && !isAway(e);
  const short = text => text.trim().replace(/\s+/g, ' ').slice(0, 60);
  const inSight = 'body :not(script, style, .skip, .skip *, .chart *)';

  // --- the page is as wide as the screen, and everything is on it
  if (root.scrollWidth > innerWidth) wrong.push(`the page is ${root.scrollWidth} wide, the screen ${innerWidth}`);
  const scrolls = e => e.closest('.scroll, .table-wrapper, pre, .highlight, .sidebar-drawer, .toc-drawer, .sd-scroll');
  for (const e of document.querySelectorAll(inSight)) {
    if (!isShown(e) || (scrolls(e) && scrolls(e) !== e)) continue;
    const box = e.getBoundingClientRect(), css = getComputedStyle(e);
    if (box.width && box.height > 1 && (box.right > innerWidth + 1 || box.left < -1)) wrong.push(`beyond the edge: ${e.tagName} ${short(e.textContent)}`);
    const hides = css.overflowX === 'hidden' || css.overflowX === 'clip';
    if (hides && e.scrollWidth > e.clientWidth + SLACK && e.textContent.trim()) wrong.push(`cut off: ${e.tagName} ${short(e.textContent)}`);
  }

  // --- no text stands on another
  function overlapping(items, where) {
    const sorted = items.slice().sort((a, b) => a.box.top - b.box.top);
    sorted.forEach((a, n) => {
      for (let m = n + 1; m < sorted.length && sorted[m].box.top < a.box.bottom - SLACK; m++) {
        const b = sorted[m];
        const wide = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
        const tall = Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top);
        if (wide > SLACK && tall > SLACK + 1) wrong.push(`overlap in ${where}: ${short(a.text)} | ${short(b.text)}`);
      }
    });
  }
  const texts = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, e = node.parentElement;
    if (!node.data.trim() || !e.matches(inSight) || !isShown(e) || scrolls(e) || e.closest('option')) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) texts.push({ text: node.data, box });
  }
  overlapping(texts, 'the page');

  // --- charts: labels are whole, apart and inside
  const charted = typeof charts === 'object' ? charts : {};
  function drawnTexts(place) {
    const inside = place.getBoundingClientRect();
    const out = [];
    for (const e of charted[place.id].getZr().storage.getDisplayList(true)) {
      if (e.type !== 'tspan' || e.ignore || e.invisible) continue;
      const rect = box => ({ left: inside.left + box.x, top: inside.top + box.y, right: inside.left + box.x + box.width, bottom: inside.top + box.y + box.height });
      const own = e.getBoundingRect().clone();
      if (e.transform) own.applyTransform(e.transform);
      let clip = null;
      for (const c of e.__clipPaths || []) {
        clip = c.getBoundingRect().clone();
        if (c.transform) clip.applyTransform(c.transform);
      }
      out.push({ text: e.style.text, box: rect(own), fill: e.style.fill, clip: clip && rect(clip) });
    }
    return out;
  }
  const linear = x => (x <= 0.03928 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
  const paint = document.createElement('canvas').getContext('2d');
  function rgb(colour) {
    if (!/^rgb/.test(colour)) { paint.fillStyle = '#000'; paint.fillStyle = colour; colour = paint.fillStyle; }
    if (colour[0] === '#') return [1, 3, 5].map(n => parseInt(colour.slice(n, n + 2), 16));
    return colour.match(/[\d.]+/g).slice(0, 3).map(Number);
  }
  const luminance = colour => rgb(colour).map(x => linear(x / 255)).reduce((sum, x, n) => sum + x * [0.2126, 0.7152, 0.0722][n], 0);
  function ground(e) {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if (!/, 0\)$/.test(colour) && colour !== 'transparent') return colour;
    }
    return 'rgb(255, 255, 255)';
  }
  function contrast(one, two) {
    const [a, b] = [luminance(one), luminance(two)];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  }
  function readable(colour, under, what, least = 4.5) {
    const ratio = contrast(colour, under);
    if (ratio < least) wrong.push(`contrast ${ratio.toFixed(1)} of ${what}`);
  }
  for (const place of document.querySelectorAll('.chart')) {
    if (!isShown(place)) continue;
    if (!place.querySelector('canvas, svg')) { wrong.push('nothing is drawn in ' + place.id); continue; }
    if (!place.getAttribute('aria-label')) wrong.push('no label on ' + place.id);
    const inside = place.getBoundingClientRect(), under = ground(place);
    const labels = drawnTexts(place).filter(t => t.text && t.text.trim());
    const hidden = t => t.clip && (t.box.right <= t.clip.left + 1 || t.box.left >= t.clip.right - 1);
    const seen = labels.filter(t => !hidden(t));
    if (!seen.length) wrong.push('no text in ' + place.id);
    overlapping(seen, place.id);
    for (const t of seen) {
      const edges = t.clip || inside;
      if (t.box.left < inside.left - 1 || t.box.top < inside.top - 1 || t.box.right > inside.right + 1 || t.box.bottom > inside.bottom + 1 ||
          t.box.left < edges.left - SLACK || t.box.right > edges.right + SLACK) wrong.push(`cut off in ${place.id}: ${short(t.text)}`);
      if (/(\.\.\.|…)$/.test(t.text)) wrong.push(`shortened in ${place.id}: ${short(t.text)}`);
      readable(t.fill, under, `${short(t.text)} in ${place.id}`);
    }
  }

  // --- contrast of all other text
  for (const e of document.querySelectorAll('h1, h2, h3, h4, p, li, dt, dd, th, td, footer, summary, label, button, select, input, a, code, legend, option, pre span')) {
    if (!isShown(e) || e.closest('.chart, .skip') || !short(e.textContent)) continue;
    readable(getComputedStyle(e).color, ground(e), `${e.tagName} ${short(e.textContent)}`);
  }
  return [...new Set(wrong)];
})()
