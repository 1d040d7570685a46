// pg-boss by its own calls: insert a thousand, fetch 100, complete 100.
// `drive_pg_boss.mjs install|single|batch|claim JOBS` prints the seconds that the jobs took.
import { PgBoss } from "pg-boss";

const PAYLOAD = JSON.parse(process.env.BENCH_PAYLOAD);
const QUEUE = "bench";
const BATCH = 1000;
const FETCHED = 100;

const [action, jobs] = [process.argv[2], Number(process.argv[3])];
const { PGHOST: host, PGPORT: port, PGUSER: user, PGDATABASE: database } = process.env;
const boss = new PgBoss({ host, port: Number(port), user, database });

const actions = {
  async install() {
    await boss.createQueue(QUEUE);
  },
  async single() {
    for (let n = 0; n < jobs; n++) await boss.send(QUEUE, PAYLOAD);
  },
  async batch() {
    for (let n = 0; n < jobs; n += BATCH) await boss.insert(QUEUE, Array(BATCH).fill({ data: PAYLOAD }));
  },
  async claim() {
    for (;;) {
      const found = await boss.fetch(QUEUE, { batchSize: FETCHED });
      if (!found.length) return;
      await boss.complete(QUEUE, found.map((job) => job.id));
    }
  },
};

await boss.start();
const began = performance.now();
await actions[action]();
console.log((performance.now() - began) / 1000);
await boss.stop({ graceful: false });
