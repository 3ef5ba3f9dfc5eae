/** Puts the text into the clipboard. False where the browser does not let a page do that, as without HTTPS. */
export async function copy(text: string): Promise<boolean> {
  if (!navigator.clipboard) return false
  return navigator.clipboard.writeText(text).then(
    () => true,
    () => false,
  )
}
