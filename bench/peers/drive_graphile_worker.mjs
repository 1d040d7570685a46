// graphile-worker with the settings of its authors' own performance test: 24 jobs at once, a local queue of 500, jobs
// completed in batches; one process.
// `drive_graphile_worker.mjs install|single|batch|claim JOBS` prints the seconds that the jobs took.
import { Logger, makeWorkerUtils, runMigrations, runOnce } from "graphile-worker";
import pg from "pg";

const PAYLOAD = JSON.parse(process.env.BENCH_PAYLOAD);
const TASK = "bench";
const BATCH = 1000;
const CONCURRENT_JOBS = 24;

const [action, jobs] = [process.argv[2], Number(process.argv[3])];
const pgPool = new pg.Pool({ max: CONCURRENT_JOBS + 1 });
pgPool.on("error", () => {});
const logger = new Logger(() => () => {});

async function timed(work) {
  const began = performance.now();
  await work();
  return (performance.now() - began) / 1000;
}

const actions = {
  install: () => timed(() => runMigrations({ pgPool, logger })),
  async single() {
    const utils = await makeWorkerUtils({ pgPool, logger });
    return timed(async () => {
      for (let n = 0; n < jobs; n++) await utils.addJob(TASK, PAYLOAD);
    });
  },
  async batch() {
    const utils = await makeWorkerUtils({ pgPool, logger });
    const specs = Array(BATCH).fill({ identifier: TASK, payload: PAYLOAD });
    return timed(async () => {
      for (let n = 0; n < jobs; n += BATCH) await utils.addJobs(specs);
    });
  },
  async claim() {
    const preset = {
      worker: {
        concurrentJobs: CONCURRENT_JOBS,
        maxPoolSize: CONCURRENT_JOBS + 1,
        localQueue: { size: 500, refetchDelay: { durationMs: 10 } },
        completeJobBatchDelay: 0,
        failJobBatchDelay: 0,
      },
    };
    return timed(() => runOnce({ pgPool, logger, preset, taskList: { [TASK]: async () => {} } }));
  },
};

console.log(await actions[action]());
await pgPool.end();
