// Runs a program for WASI under Node: node tests/wasi.mjs PROGRAM. It sees the current directory.
import { readFileSync } from 'node:fs';
import { WASI } from 'node:wasi';

const program = process.argv[2];
const wasi = new WASI({
  version: 'preview1', args: [program], env: {}, preopens: { '.': '.' }, returnOnExit: true,
});
const module = await WebAssembly.compile(readFileSync(program));
const imports = { wasi_snapshot_preview1: wasi.wasiImport };
process.exitCode = wasi.start(await WebAssembly.instantiate(module, imports));
