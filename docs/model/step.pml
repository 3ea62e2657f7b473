/*
 * The step protocol of dist-infer: news, schedule, agreement, launch, collect; idle, drain, error, death.
 * It models the rules of docs/protocol.md; there, each rule names the naive variants below that break when it is left out.
 *
 * Run one configuration (check.sh runs them all):
 *     spin -a -DN=3 -DDEPTH=1 -DERRORS=1 step.pml && gcc -O1 -DSAFETY -DMEMLIM=3500 -o pan pan.c && ./pan -m100000
 *     spin -t -DN=3 ... step.pml        tells the story of a counterexample (add -p for each statement)
 * No error reported = every run ends, nothing mismatched, nothing leaked, nobody forgotten.
 *
 * Parameters (-D)
 *   N        ranks, 2 or 3. D = 2 groups: group 1 is the last rank, group 0 the others (so N=3 has a group of T=2).
 *   DEPTH    0: launch(n), collect(n).   1: launch(n), collect(n-1).
 *   R        requests (2 or 3); each has a group and a true length (EOS) that no scheduler knows before collect.
 *   MAXTOK   max_tokens of each request. A prefill yields token 1; each decode one more.
 *   ABORTS ERRORS DEATHS SIGNALS   how many of each a run may suffer, at any rank and any point.
 *
 * Naive variants (-D), each must be caught:
 *   PATCH_OWN       a rank replaces an empty MoE chunk by a stand-in only in its own entry of the size vector
 *   GRAPH_LOCAL     graph or eager, and the bucket, from the rank's own batch
 *   IDLE_RETURNS    a rank without tokens skips the data-plane work of the step (no dummy)
 *   RAISE_NO_VOTE   a rank that raises before the agreement just leaves (it sits in Finalize, its beat goes on)
 *   ROOT_SILENT     rank 0 raises while it builds the news and goes to the agreement without a broadcast
 *   VOTE_ONLY       an error after the record has been posted waits for the next agreement too
 *   ABORT_ASYNC     an abort travels outside the news: each rank applies it when it happens to see it
 *   ABORT_LATE      an abort is applied one step after its news
 *   EOS_AT_ONCE     (depth 1) a finished sequence's extra token is not dropped
 *   LEAK_ABORT      an abort forgets the blocks of a sequence that is in flight
 *   IDLE_LOCAL      a rank whose own group is idle sleeps until there is news with content
 *   IDLE_ROOT       rank 0 sleeps when its own group is idle and it has nothing to say
 *   IDLE_BY_TOKENS  the pool sleeps when no rank scheduled a token (instead of: no live request, nothing in flight)
 *   IDLE_IN_FLIGHT  (depth 1) the pool sleeps or leaves while step n-1 is still to be collected; no wake-up for its errors
 *   IDLE_TIMEOUT    a sleeping worker wakes after a while and goes to the agreement without news
 *   EXIT_ROOT       rank 0 leaves when it has answered everything, the workers when the table says so
 *   NEWS_POLLED     rank 0 sends only news with content; a worker that sees none goes on without
 *   STOP_NO_WAKE    a stop signal that a sleeping worker gets is only written in its next record
 *   STOP_LOCAL      a rank that got the stop signal applies it at once, without the agreement
 *   GATHER_AT_COLLECT  collect (sampling, say) holds a collective
 *   OUT_BLOCKS      rank 0 waits in collect(k) for the other group's outputs of k
 *   KV_LOCAL        the ranks of one group have different numbers of KV blocks
 *   NO_FAREWELL     each rank leaves with its own idea of the exit code
 *   IDLE_NO_BEAT    liveness is not watched while idle
 *   PARTIAL_FAREWELL  no variant but the limit: a rank that dies while its farewell is under way to some
 *
 * Time is not modelled: a deadline is "may fire once its cause is there" (dead: the liveness deadline; failed: the failure record
 * in the store). All nondeterminism sits where it is observed (rank 0 building the news; a rank posting its record).
 */
#ifndef N
#define N 2
#endif
#ifndef DEPTH
#define DEPTH 1
#endif
#ifndef R
#define R 2
#endif
#ifndef MAXTOK
#define MAXTOK 2
#endif
#ifndef ABORTS
#define ABORTS 0
#endif
#ifndef ERRORS
#define ERRORS 0
#endif
#ifndef DEATHS
#define DEATHS 0
#endif
#ifndef SIGNALS
#define SIGNALS 0
#endif

#define LAST        (N - 1)
#define GROUP(r)    ((r) == LAST)                   /* 0 or 1 */
#define PREFILL     3                               /* tokens of a prompt */
#define MAX_TOKENS  6                               /* token budget of a step and group */
#define MOE_CHUNK   3                               /* tokens of all groups in one MoE chunk */
#define GRAPH_MAX   2                               /* largest captured batch */
#define MAX_STEPS   (8 + 5 * R)                     /* more steps than any run needs: beyond = livelock */
#define BIT(q)      (1 << (q))
#define IN(mask, q) (((mask) >> (q)) & 1)
#define MAX(a, b)   ((a) > (b) -> (a) : (b))
#define ONE(t)      ((t) == 0 -> 1 : (t))           /* an idle group runs one dummy token */
#define SPLIT(t, c, i) ((t) / (c) + ((i) < (t) % (c) -> 1 : 0))

/* ---- what the environment decided before the run; ranks read eos[] only at collect ---- */
byte group_of[R];                                   /* rank 0's placement */
byte eos[R];                                        /* true number of tokens */
byte kv_blocks;                                     /* per group: 2 or 3. A sequence takes one block for each token it is to make */
bool no_eof;                                        /* the input never ends: only a signal ends the run */
byte aborts = ABORTS, errors = ERRORS, deaths = DEATHS, signals = SIGNALS;

/* ---- control plane: the news (broadcast), the agreement (all-gather), the wake-up, the outputs, the farewell ---- */
byte news_step, news_new, news_abort;
bool news_eof;
typedef Record { byte tok; byte live; bool prefill; bool err; bool stop; bool woke };
Record table[2 * N];                                /* parity of the step * N + rank */
byte records[2], readers[2];
byte wakes;                                         /* wake-up messages from workers that rank 0 has not received yet */
chan outputs = [3] of { byte, byte };               /* group 1 -> rank 0: (tokens of, finished) as masks of requests */
byte farewell[N], farewells;
byte cut_off;                                       /* ranks that a dying rank's last contribution does not reach */

/* ---- data plane: rank r has posted posted[r] collectives; the i-th of all ranks must be the same ---- */
byte posted[N];
int  desc[8];                                       /* descriptor of each collective that some, not all, have posted */
#if N == 2
#define MIN_POSTED  (posted[0] < posted[1] -> posted[0] : posted[1])
#define OTHERS_PAST(me, x) (posted[1 - (me)] > (x))
#define ALL_PAST(x) (posted[0] > (x) && posted[1] > (x))
#else
#define MIN_POSTED  (posted[0] < posted[1] -> (posted[0] < posted[2] -> posted[0] : posted[2]) \
                                            : (posted[1] < posted[2] -> posted[1] : posted[2]))
#define OTHERS_PAST(me, x) (((me) != 0 && posted[0] > (x)) || ((me) != 1 && posted[1] > (x)) || ((me) != 2 && posted[2] > (x)))
#define ALL_PAST(x) (posted[0] > (x) && posted[1] > (x) && posted[2] > (x))
#endif

/* ---- failure ---- */
bool failed;                                        /* a failure record stands in the store (a rank failed fast) */
bool dead;                                          /* some rank is dead: its beat has stopped */
#define BROKEN (failed || dead)

/* ---- ghosts for the checks ---- */
byte res[R];                                        /* rank 0's view: 0 unknown 1 accepted 2 finished 3 aborted 4 given back 5 error */
byte got[R];                                        /* tokens delivered */
byte abort_step[R];                                 /* news that carried the abort */
bool started[R];
byte free_at_exit[N];
byte code_of[N];                                    /* exit code + 1; 0 = still there */
bool is_dead[N];
byte gone;

inline deliver(toks, fins) {                        /* rank 0 -> output */
    q = 0;
    do
    :: q < R ->
        if
        :: IN(toks, q) && res[q] == 1 -> got[q]++; assert(got[q] <= eos[q])      /* else an extra token got out */
        :: IN(toks, q) && res[q] == 2 -> assert(false)                           /* a token after the end */
        :: else -> skip
        fi;
        if
        :: IN(fins, q) && res[q] == 1 -> res[q] = 2; assert(got[q] == eos[q])
        :: else -> skip
        fi;
        q++
    :: else -> break
    od;
    q = 0
}

inline answer_rest(how) {                           /* rank 0, once, before it leaves */
    q = 0;
    do
    :: q < R ->
        if
        :: res[q] == 1 -> res[q] = how; assert(how != 4 || !started[q])          /* drain lets what runs finish */
        :: else -> skip
        fi;
        q++
    :: else -> break
    od;
    q = 0
}

inline last_checks() {                              /* in the last rank that goes */
    gone++;
    if
    :: gone == N ->
        i = 0; q = 0;
        do                                          /* q: the code of the first survivor */
        :: i < N ->
            if
            :: is_dead[i] -> skip
            :: !is_dead[i] && q == 0 -> q = code_of[i]
            :: !is_dead[i] && q != 0 -> assert(code_of[i] == q)                  /* same code everywhere */
            fi;
            if
            :: !is_dead[i] && code_of[i] != 2 -> assert(free_at_exit[i] == kv_blocks)   /* no block leak */
            :: else -> skip
            fi;
            i++
        :: else -> break
        od;
        assert(is_dead[0] || q == 2 || (len(outputs) == 0 && wakes == 0));         /* no message is left behind */
        i = 0;
        do
        :: i < R -> assert(is_dead[0] || res[i] != 1); i++                       /* nobody is forgotten */
        :: else -> break
        od;
        i = 0; q = 0
    :: else -> skip
    fi
}

#if DEATHS
#define MAY_DIE  if :: deaths > 0 -> deaths--; goto dies :: skip fi
#else
#define MAY_DIE  skip
#endif
#if ERRORS
#define MAY_RAISE(what) if :: errors > 0 && !err -> errors--; what :: skip fi
#else
#define MAY_RAISE(what) skip
#endif

/*
 * FINE: ranks interleave between the numbered blocks of a step. Default: a rank runs until it has to wait; its other actions
 * commute with those of the other ranks (posting a record or a collective, reading a table), so nothing is lost but copies.
 */
#ifdef FINE
#define BEGIN atomic {
#define END   };
#define WHOLE_BEGIN
#define WHOLE_END
#else
#define BEGIN
#define END   ;
#define WHOLE_BEGIN atomic {
#define WHOLE_END   }
#endif

proctype Rank(byte me)
{
    byte n = 1;                                     /* step */
    byte q, i, x;
    bool err, sig, woke, drain, eof, quiet, launched, was_launched, over;
    /* sequences of the own group: 0 unknown, 1 waiting, 2 running, 3 gone */
    byte state[R], scheduled[R], known[R];
    byte held[R];                                   /* blocks */
    byte fin, cancelled, preempted;                 /* masks */
    byte batch, was_batch, upto, was_upto;          /* what step n and step n-1 run; collectives posted up to their end */
    byte free, tok, live, own_live, t0, t1, chunks, code, toks, fins;
    byte next;                                      /* rank 0: next request of the input */
    bool prefill, graph, owes, owed1, owed2, rec_err, rec_stop;
    int d;
#ifdef ABORT_LATE
    byte late;
#endif

    WHOLE_BEGIN
    free = kv_blocks;
#ifdef KV_LOCAL
    free = (me == 1 -> MAXTOK : kv_blocks);
#endif
    quiet = true;                                   /* before step 1 nothing is live and nothing is in flight */

step:
    assert(n < MAX_STEPS);
    /* ================= 1. news ================= */
    if
    :: me == 0 ->
        BEGIN
            MAY_DIE;
            if
            :: err -> skip                          /* an empty news leads everybody to the vote */
#ifdef IDLE_ROOT
            :: !err && own_live == 0 ->
#else
            :: !err && quiet ->                     /* idle: sleeping poll of everything that can end it */
#endif
                if
                :: next < R && !drain -> news_new = BIT(next); res[next] = 1; next++
                :: next + 1 < R && !drain -> news_new = BIT(next) | BIT(next + 1); res[next] = 1; res[next + 1] = 1; next = next + 2
                :: next == R && !eof && !no_eof -> eof = true
                :: signals > 0 && !sig -> signals--; sig = true
                :: errors > 0 -> errors--; err = true
                :: wakes > 0 -> skip                 /* probed, received after the table */
#ifdef IDLE_NO_BEAT
                :: failed -> goto fails
#else
                :: BROKEN -> goto fails
#endif
                fi
            :: else ->
                if
                :: next < R && !drain -> news_new = BIT(next); res[next] = 1; next++
                :: next + 1 < R && !drain -> news_new = BIT(next) | BIT(next + 1); res[next] = 1; res[next + 1] = 1; next = next + 2
                :: next == R && !eof && !no_eof -> eof = true
                :: skip
                fi;
                if
                :: aborts > 0 && res[0] == 1 && !IN(news_new, 0) && abort_step[0] == 0 -> aborts--; news_abort = BIT(0); res[0] = 3; abort_step[0] = n
                :: aborts > 0 && res[1] == 1 && !IN(news_new, 1) && abort_step[1] == 0 -> aborts--; news_abort = BIT(1); res[1] = 3; abort_step[1] = n
                :: skip
                fi
            fi;
            MAY_RAISE(err = true);
#ifdef ROOT_SILENT
            if
            :: err -> goto receive
            :: else
            fi;
#endif
            news_eof = eof;
            news_step = n;                          /* the broadcast; rank 0 goes on to 2 */
            printf("rank 0 step %d: news, new %d abort %d eof %d\n", n, news_new, news_abort, news_eof)
        END
    :: else
    fi;
    /* ================= 2. apply the news, schedule; 3. post the record ================= */
receive:
    BEGIN
        MAY_DIE;
        if
#ifdef IDLE_LOCAL
        :: news_step == n && (me == 0 || own_live > 0 || news_new || news_eof) -> skip
#else
        :: news_step == n -> skip
#endif
#ifdef ROOT_SILENT
        :: me == 0 && err && news_step < n -> skip
#endif
#ifdef IDLE_TIMEOUT
        :: news_step < n && me != 0 && quiet -> skip         /* slept long enough: goes to the agreement by itself */
#endif
#ifdef NEWS_POLLED
        :: news_step < n && me != 0 && own_live > 0 -> skip  /* saw none in time: goes on without */
#endif
        :: news_step < n && me != 0 && quiet && signals > 0 && !sig ->           /* the signal finds a sleeping worker */
            signals--; sig = true;
#ifndef STOP_NO_WAKE
            wakes = wakes + 1 - woke; woke = true;   /* at most one wake-up a record */
#endif
            goto receive
        :: news_step < n && me != 0 && quiet && errors > 0 && !err ->            /* something breaks while idle */
            errors--; err = true; wakes = wakes + 1 - woke; woke = true; goto receive
#ifdef IDLE_NO_BEAT
        :: news_step < n && (failed || dead && !quiet) -> goto fails
#else
        :: news_step < n && BROKEN -> goto fails
#endif
        fi;
        MAY_RAISE(err = true);
#ifdef RAISE_NO_VOTE
        if
        :: err -> false                              /* sits in Finalize for ever */
        :: else
        fi;
#endif
        if
        :: signals > 0 && !sig && !drain -> signals--; sig = true
        :: skip
        fi;
#ifdef STOP_LOCAL
        if
        :: sig -> drain = true
        :: else
        fi;
#endif
#ifdef ABORT_ASYNC
        x = 0;                                       /* the aborts this rank sees in time */
        q = 0;
        do
        :: q < R ->
            if
            :: abort_step[q] != 0 && !IN(cancelled, q) -> x = x | BIT(q)
            :: abort_step[q] == 0 || IN(cancelled, q) || abort_step[q] == n -> skip
            fi;
            q++
        :: else -> break
        od;
        skip;
#endif
        d_step {
#ifdef ABORT_LATE
            x = late; late = news_abort;
#elif !defined(ABORT_ASYNC)
            x = (news_step == n -> news_abort : 0);
#endif
            eof = eof || (news_step == n && news_eof);
            /* apply: admissions, then aborts; both count from this very step on, on all ranks of the group */
            tok = 0; live = 0; prefill = false; batch = 0; q = 0;
            do
            :: q < R && group_of[q] == GROUP(me) ->
                if
                :: state[q] == 0 && ((news_step == n && IN(news_new, q))
#ifdef NEWS_POLLED
                                     || (res[q] == 1)
#endif
                                    ) -> state[q] = 1
                :: else -> skip
                fi;
                if
                :: IN(x, q) && !IN(cancelled, q) ->
                    cancelled = cancelled | BIT(q);
                    if
                    :: state[q] == 1 -> state[q] = 3
                    :: state[q] == 2 && !IN(was_batch, q) -> state[q] = 3; free = free + held[q]; held[q] = 0
#ifdef LEAK_ABORT
                    :: state[q] == 2 && IN(was_batch, q) -> state[q] = 3
#endif
                    :: else -> skip                  /* in flight: released when that step is collected */
                    fi
                :: else -> skip
                fi;
                if
                :: state[q] == 1 && drain && !started[q] -> state[q] = 3          /* drain: given back, never started */
                :: else -> skip
                fi;
                q++
            :: q < R && group_of[q] != GROUP(me) -> q++
            :: else -> break
            od;
            /* schedule, oldest first. A waiting request may find no block; a group may have no work */
            q = 0; i = 0;                            /* i: the queue is stuck at its head */
            do
            :: q < R ->
                if
                :: state[q] == 2 && !IN(fin, q) && !IN(cancelled, q) && !IN(preempted, q) ->
                    live++;
                    if
                    :: scheduled[q] < MAXTOK && free == 0 ->                      /* takes a block from the youngest that runs */
                        i = R - 1;
                        do
                        :: i > q && (state[i] != 2 || IN(fin, i) || IN(cancelled, i) || IN(preempted, i)) -> i--
                        :: else -> break
                        od;
                        if
                        :: i > q ->
                            if
                            :: IN(was_batch, i) -> preempted = preempted | BIT(i); live++
                            :: else -> state[i] = 1; free = free + held[i]; held[i] = 0; scheduled[i] = known[i]
                            fi
                        :: else -> skip              /* it is the youngest: it waits */
                        fi;
                        i = 0
                    :: else -> skip
                    fi;
                    if
                    :: scheduled[q] < MAXTOK && free > 0 -> batch = batch | BIT(q); scheduled[q]++; tok++; free--; held[q]++
                    :: else -> skip
                    fi
                :: else -> skip
                fi;
                q++
            :: else -> break
            od;
            q = 0;
            do
            :: q < R ->
                if
                :: state[q] == 1 ->
                    live++;
                    if
                    :: i == 0 && free > known[q] && preempted == 0 && tok + PREFILL <= MAX_TOKENS ->
                        state[q] = 2; scheduled[q] = known[q] + 1; started[q] = true;
                        held[q] = scheduled[q]; free = free - held[q];
                        batch = batch | BIT(q); tok = tok + PREFILL; prefill = true
                    :: else -> i = 1
                    fi
                :: else -> skip
                fi;
                q++
            :: else -> break
            od;
#ifndef ABORT_ASYNC
            q = 0;
            do                                       /* an abort in news(n) keeps the sequence out of step n and later */
            :: q < R -> assert(!IN(batch, q) || abort_step[q] == 0 || n < abort_step[q]); q++
            :: else -> break
            od;
#endif
            /* the record: err wins, a failed rank schedules nothing */
            if
            :: err -> tok = 0; batch = 0; prefill = false
            :: else -> skip
            fi;
            x = (n % 2) * N + me;
            table[x].tok = tok; table[x].live = live; table[x].prefill = prefill;
            table[x].err = err; table[x].stop = sig; table[x].woke = woke; woke = false;
            records[n % 2]++;
            printf("rank %d step %d: record, tokens %d live %d prefill %d err %d stop %d\n", me, n, tok, live, prefill, err, sig);
            own_live = live;
            q = 0; i = 0; x = 0;
        }
    END
#if DEATHS
    BEGIN                                            /* dies while its record is under way: some get it, some don't */
        if
        :: deaths > 0 && me != 0 -> deaths--; cut_off = BIT(0); goto dies
        :: deaths > 0 && me != 1 -> deaths--; cut_off = BIT(1); goto dies
#if N == 3
        :: deaths > 0 && me != 2 -> deaths--; cut_off = BIT(2); goto dies
#endif
        :: skip
        fi
    END
#endif
    /* ================= 4. prepare the inputs while the agreement travels; 5. the table decides ================= */
    BEGIN
        MAY_DIE;
#ifdef VOTE_ONLY
        MAY_RAISE(err = true);
#else
        MAY_RAISE(goto fails_fast);
#endif
        if
        :: records[n % 2] == N && !IN(cut_off, me) -> skip
        :: (records[n % 2] < N || IN(cut_off, me)) && BROKEN -> goto fails
        fi;
        d_step {
            x = (n % 2) * N;
            rec_err = table[x].err || table[x + 1].err;
            rec_stop = table[x].stop || table[x + 1].stop;
            prefill = table[x].prefill || table[x + 1].prefill;
            live = table[x].live + table[x + LAST].live;
            t0 = table[x].tok; t1 = table[x + LAST].tok;
#if N == 3
            rec_err = rec_err || table[x + 2].err;
            rec_stop = rec_stop || table[x + 2].stop;
            prefill = prefill || table[x + 2].prefill;
            /* digest: the ranks of one group hold one schedule */
            assert(rec_err || (table[x].tok == table[x + 1].tok && table[x].live == table[x + 1].live && table[x].prefill == table[x + 1].prefill));
#endif
            if
            :: me == 0 -> wakes = wakes - (table[x + 1].woke + (N == 3 -> table[x + LAST].woke : 0))     /* received now */
            :: else -> skip
            fi;
            was_launched = launched;                 /* of step n-1 */
            launched = (t0 + t1 > 0);
            drain = drain || rec_stop;
#ifdef IDLE_BY_TOKENS
            quiet = !launched;
#elif defined(IDLE_IN_FLIGHT)
            quiet = (!launched && live == 0);
#else
            quiet = (!launched && live == 0 && (DEPTH == 0 || !was_launched));
#endif
            over = quiet && (eof || drain);
            printf("rank %d step %d: table, tokens %d %d err %d drain %d quiet %d over %d\n", me, n, t0, t1, rec_err, drain, quiet, over);
#ifdef EXIT_ROOT
            over = (me == 0 -> next == R && eof && res[0] != 1 && res[1] != 1 && res[R - 1] != 1 : over);
#endif
            graph = (!prefill && t0 <= GRAPH_MAX && t1 <= GRAPH_MAX);
            readers[n % 2]++;
            if
            :: readers[n % 2] == N ->
                readers[n % 2] = 0; records[n % 2] = 0; i = 0;
                do
                :: i < N -> table[x + i].tok = 0; table[x + i].live = 0; table[x + i].prefill = false;
                            table[x + i].err = false; table[x + i].stop = false; table[x + i].woke = false; i++
                :: else -> break
                od
            :: else -> skip
            fi;
            if
            :: me == 0 -> news_new = 0; news_abort = 0       /* all have read it */
            :: else -> skip
            fi;
            chunks = (graph -> 1 : (ONE(t0) + ONE(t1) + MOE_CHUNK - 1) / MOE_CHUNK);
            live = 0; prefill = false; x = 0; i = 0;
        }
        if
        :: rec_err -> goto voted                     /* the same table on every rank: all leave here, nothing is launched */
        :: else
        fi
    END
    /* ================= 6. launch: all collectives of the step, sampling included ================= */
#ifdef IDLE_RETURNS
    launched = launched && batch != 0;
#endif
    i = 0;
    do
    :: launched && i < chunks ->
        BEGIN
            MAY_DIE;
#ifdef VOTE_ONLY
            MAY_RAISE(err = true; goto launched_all);
#else
            MAY_RAISE(goto fails_fast);
#endif
            d_step {
#ifdef GRAPH_LOCAL
                x = (GROUP(me) == 0 -> t0 : t1);
                graph = (x <= GRAPH_MAX);
                d = (graph -> 256 + 16 * ONE(x) + ONE(x) : 512 + 16 * SPLIT(ONE(t0), chunks, i) + SPLIT(ONE(t1), chunks, i));
#elif defined(PATCH_OWN)
                d = (graph -> 256 + 16 * MAX(ONE(t0), t1) + MAX(t0, ONE(t1))
                           : 512 + 16 * (GROUP(me) == 0 -> ONE(SPLIT(ONE(t0), chunks, i)) : SPLIT(ONE(t0), chunks, i))
                                      + (GROUP(me) == 1 -> ONE(SPLIT(ONE(t1), chunks, i)) : SPLIT(ONE(t1), chunks, i)));
#else
                d = (graph -> 256 + 16 * MAX(ONE(t0), t1) + MAX(ONE(t1), t0)
                           : 512 + 16 * ONE(SPLIT(ONE(t0), chunks, i)) + ONE(SPLIT(ONE(t1), chunks, i)));
#endif
                printf("rank %d step %d: collective %d, eager %d sizes %d %d\n", me, n, i, (graph -> 0 : 1), (d / 16) % 16, d % 16);
                d = d + 1024 * n;                    /* the step, for the check only */
                x = posted[me];
                if
                :: OTHERS_PAST(me, x) -> assert(desc[x % 8] == d)                 /* kind and sizes match on all ranks */
                :: else -> desc[x % 8] = d
                fi;
                posted[me]++;
                if
                :: ALL_PAST(x) -> desc[x % 8] = 0
                :: else -> skip
                fi;
                x = 0; d = 0; i++;
            }
        END
#if DEPTH == 0
        if                                           /* the host waits inside the collective */
        :: MIN_POSTED >= posted[me] -> skip
        :: MIN_POSTED < posted[me] && BROKEN -> goto fails
        fi
#endif
    :: else -> break
    od;
launched_all:
    i = 0; chunks = 0; graph = false; rec_err = false; rec_stop = false; upto = posted[me];
    /* ================= 7. collect n (depth 0) or n-1 (depth 1): no collective in here ================= */
    BEGIN
        MAY_DIE;
#if DEPTH == 0
        was_launched = launched; was_upto = upto; was_batch = batch; batch = 0;
#endif
#ifdef IDLE_IN_FLIGHT
        if
        :: was_launched && MIN_POSTED >= was_upto -> skip
        :: !was_launched -> skip
        :: was_launched && MIN_POSTED < was_upto && BROKEN -> goto fails
        fi;
#else
        if
        :: !was_launched || MIN_POSTED >= was_upto -> skip
        :: was_launched && MIN_POSTED < was_upto && BROKEN -> goto fails
        fi;
#endif
        if
        :: was_launched && !err -> MAY_RAISE(err = true)
        :: else
        fi;
#ifdef GATHER_AT_COLLECT
        if
        :: was_launched && !err -> posted[me]++
        :: else
        fi;
        if
        :: !was_launched || err || MIN_POSTED >= posted[me] -> skip
        :: was_launched && !err && MIN_POSTED < posted[me] && BROKEN -> goto fails
        fi;
#endif
        d_step {
            printf("rank %d step %d: collects, sequences %d\n", me, n, was_batch);
            toks = 0; fins = 0; q = 0;
            do
            :: q < R && IN(was_batch, q) ->
                if
                :: IN(cancelled, q) -> skip                                       /* aborted while in flight */
#ifdef EOS_AT_ONCE
                :: IN(fin, q) -> toks = toks | BIT(q)
#else
                :: !IN(cancelled, q) && IN(fin, q) -> skip                        /* the extra token */
#endif
                :: !IN(cancelled, q) && !IN(fin, q) ->
                    known[q]++; toks = toks | BIT(q);
                    if
                    :: known[q] == eos[q] -> fin = fin | BIT(q); fins = fins | BIT(q)
                    :: else -> skip
                    fi
                fi;
                q++
            :: q < R && !IN(was_batch, q) -> q++
            :: else -> break
            od;
            q = 0;
            do                                       /* release what has ended and is in no launched step any more */
            :: q < R ->
                if
                :: state[q] == 2 && (IN(fin, q) || IN(cancelled, q)) && !IN(batch, q) ->
                    state[q] = 3; free = free + held[q]; held[q] = 0; scheduled[q] = 0; known[q] = 0
                :: state[q] == 2 && !IN(fin, q) && !IN(cancelled, q) && IN(preempted, q) ->
                    state[q] = 1; free = free + held[q]; held[q] = 0; scheduled[q] = known[q]
                :: else -> skip
                fi;
                q++
            :: else -> break
            od;
            q = 0; preempted = 0; assert(free <= kv_blocks);
            if
            :: err -> toks = 0; fins = 0
            :: else -> skip
            fi
        }
        if
        :: me == LAST && was_launched && was_batch != 0 && !err -> outputs!toks, fins
        :: me == 0 && was_launched && !err -> d_step { deliver(toks, fins) }
        :: else
        fi;
        was_batch = batch; was_upto = upto; toks = 0; fins = 0
    END
    /* rank 0: the other group's outputs of the step before. They are there: this table(n) proves that all have collected it */
    if
    :: me == 0 ->
        BEGIN
#ifdef OUT_BLOCKS
#if DEPTH == 0
            owes = (t1 > 0); t1 = 0;
#else
            owes = owed1; owed1 = false;
#endif
#else
#if DEPTH == 0
            owes = owed1;
#else
            owes = owed2;
#endif
#endif
            if
            :: owes ->
                if
                :: outputs?toks, fins -> skip
                :: empty(outputs) && BROKEN -> goto fails
                fi;
                d_step { deliver(toks, fins) }
                MAY_RAISE(err = true)
            :: else
            fi;
            if                                       /* those of the step just collected may be taken if they have arrived */
#if DEPTH == 0
            :: t1 > 0 && nempty(outputs) -> outputs?toks, fins; d_step { deliver(toks, fins); t1 = 0 }
#else
            :: owed1 && nempty(outputs) -> outputs?toks, fins; d_step { deliver(toks, fins); owed1 = false }
#endif
            :: skip
            fi;
            d_step { owed2 = owed1; owed1 = (t1 > 0); owes = false; toks = 0; fins = 0; t0 = 0; t1 = 0; }
        END
    :: else -> t0 = 0; t1 = 0
    fi;
    if
    :: !over -> n++; goto step
    :: else
    fi;

    /* ================= farewell: one last all-gather, of exit codes ================= */
    BEGIN
        MAY_DIE;
        code = 0;
        if
        :: me == 0 && drain && (next < R || (res[0] == 1) || (res[1] == 1) || (res[R - 1] == 1)) -> code = 75
        :: else
        fi;
        if
        :: me == 0 -> d_step { answer_rest((drain -> 4 : 1)) }
        :: else
        fi;
        MAY_RAISE(code = 1);                         /* closing the output may fail too */
        if
        :: err -> code = 1
        :: else
        fi;
#ifdef NO_FAREWELL
        goto leaves;
#endif
        farewell[me] = code; farewells++;
#ifdef PARTIAL_FAREWELL
        if
        :: deaths > 0 && me != 0 -> deaths--; cut_off = BIT(0); goto dies
        :: deaths > 0 && me == 0 -> deaths--; cut_off = BIT(1); goto dies
        :: skip
        fi
#else
        skip
#endif
    END
    BEGIN
        if
        :: farewells == N && !IN(cut_off, me) -> skip        /* a complete farewell wins over a death notice */
        :: (farewells < N || IN(cut_off, me)) && BROKEN -> goto fails
        fi;
        d_step {
            i = 0; code = 0;
            do
            :: i < N ->
                if
                :: farewell[i] == 1 -> code = 1
                :: farewell[i] == 75 && code == 0 -> code = 75
                :: else -> skip
                fi;
                i++
            :: else -> break
            od;
            i = 0;
        }
        goto leaves
    END

fails_fast:                                          /* after the record: others may already wait for this rank in a collective */
    failed = true;
    goto fails;
voted:                                               /* an error flag in the table: orderly; the device gets quiet, Finalize works */
    if
    :: MIN_POSTED >= posted[me] -> skip
    :: MIN_POSTED < posted[me] && BROKEN -> skip
    fi;
fails:                                               /* failure record or missing beat seen in a poll: leave, no synchronise, no Finalize */
    code = 1;
leaves:
    skip;
    d_step {
        if
        :: me == 0 && code == 1 -> answer_rest(5)
        :: else -> skip
        fi;
        printf("rank %d step %d: leaves, code %d\n", me, n, code);
        free_at_exit[me] = free; code_of[me] = code + 1;
        n = 0; q = 0; i = 0; x = 0;
        last_checks();
    }
    goto end_of_rank;
dies:
    skip;
    d_step {
        printf("rank %d step %d: dies\n", me, n);
        dead = true; is_dead[me] = true;
        last_checks();
    }
end_of_rank:
    skip
    WHOLE_END
}

init {
    byte q = 0;
    atomic {
        do
        :: q < R ->
            if :: group_of[q] = 0 :: group_of[q] = 1 fi;
            if :: eos[q] = 1 :: eos[q] = MAXTOK fi;
            q++
        :: else -> break
        od;
        if :: kv_blocks = MAXTOK :: kv_blocks = MAXTOK + 1 fi;
        if :: no_eof = false :: SIGNALS > 0 -> no_eof = true fi;
        q = 0;
        do
        :: q < N -> run Rank(q); q++
        :: else -> break
        od
    }
}
