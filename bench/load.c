/* A load generator that is too cheap to be measured itself: it sends requests that were made and signed beforehand.
 *
 *   load HOST PORT SECONDS RATE FILE [CONNECTIONS AHEAD]
 *
 * FILE holds one block a connection: a 64-bit count, then that many requests, each a 32-bit length and its bytes
 * (native byte order). Each connection sends its requests in order, one at a time. RATE is requests a second over all
 * connections; 0 sends the next as soon as the last is answered. With a rate, latency counts from when a request was
 * due and not from when it was sent, so that a stall is not hidden by the requests that it held up.
 *
 * With CONNECTIONS and AHEAD, and RATE 0, FILE holds one block, which so many connections share: whichever is free sends
 * the next request, but none that is AHEAD or more places beyond the oldest one without an answer. So the requests can
 * be parts of one stream, and the service never meets a sequence that is beyond its window.
 *
 * Prints one JSON object: seconds, requests, status (counts by HTTP status class), acknowledged and refused (counts of
 * "status":2xx and others in batch answers), latency percentiles in milliseconds.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { MAX_CONNECTIONS = 1024, BUFFER = 256 * 1024, MAX_SAMPLES = 4 * 1000 * 1000 };

typedef struct {
    const char *next;     /* the next request's length field */
    uint64_t sent, left;  /* requests */
} List;

typedef struct {
    int socket;
    List *list;
    uint64_t place;       /* of the request under way in its list */
    const char *sending;  /* what is left of the request under way */
    size_t unsent;
    double due;           /* when this request was due, or sent */
    int busy;
    char *in;
    size_t have;
} Connection;

static Connection connections[MAX_CONNECTIONS];
static List lists[MAX_CONNECTIONS];
static int count;
static uint64_t ahead;  /* 0 where no list is shared */
static float *samples;
static size_t sample_count;
static uint64_t by_class[6], lines_ok, lines_refused;

static void fail(const char *what) { perror(what); exit(1); }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static void push(Connection *c) {
    while (c->unsent) {
        ssize_t n = send(c->socket, c->sending, c->unsent, MSG_NOSIGNAL);
        if (n < 0) { if (errno == EAGAIN) return; fail("send"); }
        c->sending += n;
        c->unsent -= (size_t)n;
    }
}

static int too_far(const List *list) {
    for (int i = 0; i < count; i++)
        if (connections[i].busy && list->sent - connections[i].place >= ahead) return 1;
    return 0;
}

static int start(Connection *c, double due) {
    List *list = c->list;
    if (!list->left || (ahead && too_far(list))) return 0;
    uint32_t length;
    memcpy(&length, list->next, 4);
    c->sending = list->next + 4;
    c->unsent = length;
    c->place = list->sent++;
    list->next += 4 + length;
    list->left--;
    c->due = due;
    c->busy = 1;
    push(c);
    return 1;
}

/* All that are free and may; with a shared list, one answer can let several go on. */
static int start_free(double at) {
    int started = 0;
    for (int i = 0; i < count; i++) if (!connections[i].busy) started += start(&connections[i], at);
    return started;
}

static void count_lines(const char *body, size_t length) {
    static const char mark[] = "\"status\":";
    const char *end = body + length;
    for (const char *p = body; (p = memmem(p, (size_t)(end - p), mark, sizeof mark - 1)); ) {
        p += sizeof mark - 1;
        if (*p == '2') lines_ok++; else lines_refused++;
    }
}

/* Takes one whole answer out of the buffer; 1 if there was one. */
static int answered(Connection *c) {
    char *head_end = memmem(c->in, c->have, "\r\n\r\n", 4);
    if (!head_end) return 0;
    size_t head = (size_t)(head_end - c->in) + 4;
    size_t length = 0;
    for (char *line = c->in; line < head_end; ) {
        if (!strncasecmp(line, "content-length:", 15)) length = strtoul(line + 15, NULL, 10);
        char *newline = memchr(line, '\n', (size_t)(head_end + 2 - line));
        if (!newline) break;
        line = newline + 1;
    }
    if (c->have < head + length) return 0;
    int status_class = c->in[9] - '0';
    if (status_class >= 0 && status_class < 6) by_class[status_class]++;
    count_lines(c->in + head, length);
    c->have -= head + length;
    memmove(c->in, c->in + head + length, c->have);
    return 1;
}

static int compare(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static double percentile(double p) {
    return sample_count ? samples[(size_t)(p * (double)(sample_count - 1))] * 1e3 : 0;
}

int main(int argc, char **argv) {
    if (argc != 6 && argc != 8) {
        fprintf(stderr, "usage: load HOST PORT SECONDS RATE FILE [CONNECTIONS AHEAD]\n");
        return 2;
    }
    double seconds = atof(argv[3]), rate = atof(argv[4]);
    int file = open(argv[5], O_RDONLY);
    struct stat info;
    if (file < 0 || fstat(file, &info)) fail(argv[5]);
    const char *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE | MAP_POPULATE, file, 0);
    if (data == MAP_FAILED) fail("mmap");
    samples = malloc(MAX_SAMPLES * sizeof *samples);

    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2]))};
    inet_pton(AF_INET, argv[1], &address.sin_addr);
    int poll = epoll_create1(0), list_count = 0;
    for (const char *p = data, *end = data + info.st_size; p < end && list_count < MAX_CONNECTIONS; list_count++) {
        List *list = &lists[list_count];
        memcpy(&list->left, p, 8);
        p += 8;
        list->next = p;
        for (uint64_t i = 0; i < list->left; i++) { uint32_t n; memcpy(&n, p, 4); p += 4 + n; }
    }
    ahead = argc == 8 ? strtoull(argv[7], NULL, 10) : 0;
    for (int wanted = argc == 8 ? atoi(argv[6]) : list_count; count < wanted && count < MAX_CONNECTIONS; count++) {
        Connection *c = &connections[count];
        c->list = &lists[ahead ? 0 : count];
        c->in = malloc(BUFFER);
        c->socket = socket(AF_INET, SOCK_STREAM, 0);
        if (connect(c->socket, (struct sockaddr *)&address, sizeof address)) fail("connect");
        setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
        fcntl(c->socket, F_SETFL, O_NONBLOCK);
        struct epoll_event e = {.events = EPOLLIN | EPOLLOUT | EPOLLET, .data.ptr = c};
        epoll_ctl(poll, EPOLL_CTL_ADD, c->socket, &e);
    }

    double began = now(), end = began + seconds, due = began;
    int turn = 0, dry = 0, busy = 0;
    if (rate == 0) busy += start_free(now());
    uint64_t requests = 0;
    while (!dry || busy) {
        double t = now();
        if (t >= end) dry = 1;
        if (t >= end + 10) break;
        while (rate > 0 && !dry && due <= t) {
            int tried = 0;
            while (tried < count && connections[turn].busy) { turn = (turn + 1) % count; tried++; }
            if (tried == count) break;
            if (!start(&connections[turn], due)) { dry = 1; break; }
            busy++;
            turn = (turn + 1) % count;
            due += 1 / rate;
        }
        struct epoll_event events[256];
        int n = epoll_wait(poll, events, 256, 1);
        for (int i = 0; i < n; i++) {
            Connection *c = events[i].data.ptr;
            if (c->unsent) push(c);
            for (;;) {
                ssize_t got = recv(c->socket, c->in + c->have, BUFFER - c->have, 0);
                if (got == 0) { fprintf(stderr, "the server closed a connection\n"); return 1; }
                if (got < 0) { if (errno == EAGAIN) break; fail("recv"); }
                c->have += (size_t)got;
                if (!answered(c)) continue;
                requests++;
                c->busy = 0;
                busy--;
                double at = now();
                if (sample_count < MAX_SAMPLES) samples[sample_count++] = (float)(at - c->due);
                if (rate == 0 && !dry) busy += start_free(at);
            }
        }
        if (rate == 0 && !busy) dry = 1;
    }
    double took = now() - began;
    qsort(samples, sample_count, sizeof *samples, compare);
    printf("{\"seconds\": %.3f, \"requests\": %lu, \"http_2xx\": %lu, \"http_4xx\": %lu, \"http_5xx\": %lu, "
           "\"lines_ok\": %lu, \"lines_refused\": %lu, \"p50_ms\": %.3f, \"p99_ms\": %.3f, \"max_ms\": %.3f}\n",
           took, requests, by_class[2], by_class[4], by_class[5], lines_ok, lines_refused,
           percentile(0.5), percentile(0.99), percentile(1));
    return 0;
}
