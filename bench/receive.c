/* A receiver that is too cheap to be measured itself: it answers every request with 204 as soon as its body is there.
 *
 *   receive
 *
 * Takes a free port of 127.0.0.1, prints it, and serves until its standard input is closed. It knows no chunked bodies.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

enum { BUFFER = 64 * 1024 };

typedef struct {
    int socket;
    size_t have;
    char in[BUFFER];
} Connection;

static const char answer[] = "HTTP/1.1 204 No Content\r\n\r\n";

static void fail(const char *what) { perror(what); exit(1); }

/* The length of the whole request at the buffer's start; 0 while its head is not complete. */
static size_t request_length(const Connection *c) {
    const char *head_end = memmem(c->in, c->have, "\r\n\r\n", 4);
    if (!head_end) return 0;
    size_t length = (size_t)(head_end - c->in) + 4;
    for (const char *line = c->in; line < head_end; ) {
        if (!strncasecmp(line, "content-length:", 15)) return length + strtoul(line + 15, NULL, 10);
        line = (const char *)memchr(line, '\n', (size_t)(head_end + 2 - line)) + 1;
    }
    return length;
}

/* 0 once the connection is over. */
static int serve(Connection *c) {
    ssize_t got = recv(c->socket, c->in + c->have, BUFFER - c->have, MSG_DONTWAIT);
    if (got < 0) return errno == EAGAIN;
    if (got == 0) return 0;
    c->have += (size_t)got;
    for (size_t length; (length = request_length(c)) && length <= c->have; ) {
        if (send(c->socket, answer, sizeof answer - 1, MSG_NOSIGNAL) < 0) return 0;
        c->have -= length;
        memmove(c->in, c->in + length, c->have);
    }
    return c->have < BUFFER;
}

static void watch(int poll, int socket, void *what) {
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = what};
    if (epoll_ctl(poll, EPOLL_CTL_ADD, socket, &event)) fail("epoll_ctl");
}

int main(void) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), poll = epoll_create1(0);
    if (bind(listener, (struct sockaddr *)&address, length) || listen(listener, 1024)) fail("listen");
    if (getsockname(listener, (struct sockaddr *)&address, &length)) fail("getsockname");
    watch(poll, listener, &listener);
    watch(poll, STDIN_FILENO, NULL);
    printf("%d\n", ntohs(address.sin_port));
    fflush(stdout);
    for (;;) {
        struct epoll_event events[256];
        int n = epoll_wait(poll, events, 256, -1);
        for (int i = 0; i < n; i++) {
            void *what = events[i].data.ptr;
            if (!what) return 0;
            if (what == &listener) {
                Connection *c = malloc(sizeof *c);
                c->socket = accept(listener, NULL, NULL);
                c->have = 0;
                if (c->socket < 0) { free(c); continue; }
                setsockopt(c->socket, IPPROTO_TCP, TCP_NODELAY, &(int){1}, sizeof(int));
                watch(poll, c->socket, c);
            } else if (!serve(what)) {
                close(((Connection *)what)->socket);
                free(what);
            }
        }
    }
}
