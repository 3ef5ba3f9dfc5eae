// A clipboard of the page's own, in the place of the one that all pages of a browser share.
// Runs in an isolated world of each document, before the document's own scripts. Evaluates to a function that takes
// what is on the clipboard now, as a JSON object of texts by type.
//
// Copy, cut and paste events come from real keys. Each is stopped before anybody else sees it, and the page gets an
// event of its own in its place, with the same target and the page's own data. What the browser would do next is done
// here: a copy that the page did not cancel takes the selected text, and a paste inserts text as typing does.
(held => {
  if (globalThis.dartClipboard) {
    globalThis.dartClipboard.held = held;
    return;
  }
  const own = globalThis.dartClipboard = { held };

  const passOn = (event, data) => event.composedPath()[0].dispatchEvent(new ClipboardEvent(
    event.type, { clipboardData: data, bubbles: true, cancelable: true, composed: true }));

  const focused = () => {
    let element = document.activeElement;
    while (element?.shadowRoot?.activeElement) element = element.shadowRoot.activeElement;
    return element;
  };

  const removeSelected = () => {
    if (document.execCommand('delete')) return;
    const element = focused();  // no command runs inside another, as when the page itself called execCommand('cut')
    if (element?.setRangeText) {
      element.setRangeText('');
      element.dispatchEvent(new InputEvent('input', { bubbles: true, composed: true, inputType: 'deleteByCut' }));
    } else if (element?.isContentEditable) getSelection().deleteFromDocument();
  };

  const onCopy = event => {
    const data = new DataTransfer();
    const natural = passOn(event, data);
    if (natural) {
      const secret = focused()?.type === 'password';
      const text = secret ? '' : String(getSelection());
      if (!text) return;
      data.setData('text/plain', text);
      if (event.type === 'cut') removeSelected();
    }
    own.held = Object.fromEntries(Array.from(data.types, type => [type, data.getData(type)]));
    dartCopied(JSON.stringify(own.held));
  };

  const onPaste = event => {
    const data = new DataTransfer();
    for (const [type, text] of Object.entries(own.held)) data.setData(type, text);
    const natural = passOn(event, data);
    const text = data.getData('text/plain');
    if (!natural || !text) return;
    const element = focused();
    const inserted = element?.tagName === 'INPUT' ? text.replace(/\r\n|\r|\n/g, ' ') : text;
    const wanted = { bubbles: true, cancelable: true, composed: true, inputType: 'insertFromPaste', data: inserted };
    if (element?.dispatchEvent(new InputEvent('beforeinput', wanted))) document.execCommand('insertText', false, inserted);
  };

  for (const [kind, handle] of [['copy', onCopy], ['cut', onCopy], ['paste', onPaste]]) {
    addEventListener(kind, event => {
      if (!event.isTrusted) return;
      event.stopImmediatePropagation();
      event.preventDefault();
      handle(event);
    }, true);
  }
})
