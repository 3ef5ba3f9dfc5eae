// The environment of tests whose modules are compiled as for a browser. It has no document: tests make what they need.
export default { name: 'in-browser', viteEnvironment: 'client', setup: () => ({ teardown: () => {} }) }
