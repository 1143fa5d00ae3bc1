// engine.cpp - a small serving engine around one KDA layer, to copy from.
//
//     c++ -std=c++17 -O2 examples/engine.cpp -o build/engine -pthread && build/engine
//
// Requests with prompts and answers of random lengths join and leave while others run. Each step
// makes one ragged batch of whatever there is to do - pieces of prompts, single tokens of running
// answers, padding - and calls kda_layer once. Everything the library needs from a host is here:
// a thread pool behind its parallel_for hook, bfloat16 activations as columns of one fused row per
// token, and a pool of slots for states and convolution windows.
//
// What stands in for the model is a mixer of bits: a token's row depends on the request, the
// position and, for answers, on the output before it, so that one wrong bit spoils the rest of its
// request. At the end each request is run again alone, in one thread, token by token: outputs and
// final state must be the same bits (exit status 1 if not).
#define KDA_IMPLEMENTATION
#include "../kda.h"

#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

// ---- The layer ----

constexpr std::size_t kHeads = 4, kQkHeads = 2, kK = 32, kV = 24, kTaps = 4;

// One row per token, as a fused projection writes it: all columns in elements.
constexpr std::size_t kQAt = 0, kKAt = kQAt + kQkHeads * kK, kVAt = kKAt + kQkHeads * kK,
                      kGAt = kVAt + kHeads * kV, kBetaAt = kGAt + kHeads * kK,
                      kGateAt = kBetaAt + kHeads, kRow = kGateAt + kHeads * kV,
                      kOut = kHeads * kV;

static std::uint64_t mix(std::uint64_t z) { // splitmix64's output function
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static float from_bits(std::uint64_t z) { // in [-1.5, 1.5)
    return 3.0f * (static_cast<float>(z >> 40) * 0x1p-24f - 0.5f);
}

struct Layer { // in an engine: your weights, as float32
    std::vector<float> q_conv, k_conv, v_conv, A_log, dt_bias, norm;
    kda_layer_desc desc{};

    static std::vector<float> weights(std::size_t n, std::uint64_t seed) {
        std::vector<float> x(n);
        for (std::size_t i = 0; i < n; i++) x[i] = from_bits(mix(seed << 32 | i));
        return x;
    }
    Layer()
        : q_conv(weights(kQkHeads * kK * kTaps, 1)), k_conv(weights(kQkHeads * kK * kTaps, 2)),
          v_conv(weights(kHeads * kV * kTaps, 3)), A_log(weights(kHeads, 4)),
          dt_bias(weights(kHeads * kK, 5)), norm(weights(kV, 6)) {
        desc.op.n_heads = kHeads, desc.op.n_qk_heads = kQkHeads;
        desc.op.dim_k = kK, desc.op.dim_v = kV;
        desc.op.gate = KDA_GATE_SOFTPLUS, desc.op.beta = KDA_BETA_LOGIT;
        desc.op.flags = KDA_L2_NORM_QK;
        desc.conv_width = kTaps, desc.conv_activation = KDA_ACTIVATION_SILU;
        desc.q_conv = q_conv.data(), desc.k_conv = k_conv.data(), desc.v_conv = v_conv.data();
        desc.A_log = A_log.data(), desc.dt_bias = dt_bias.data();
        desc.norm_weight = norm.data(), desc.norm_eps = 1e-5f;
    }
    Layer(const Layer &) = delete; // desc points into the object
};

// ---- Threads ----

// A fixed number of workers; the calling thread is one more. run() is the library's hook.
class ThreadPool {
public:
    explicit ThreadPool(std::size_t workers) {
        for (std::size_t i = 0; i < workers; i++) threads_.emplace_back([this] { work(); });
    }
    ThreadPool(const ThreadPool &) = delete;
    ~ThreadPool() {
        std::unique_lock<std::mutex> lock(mutex_);
        stop_ = true;
        lock.unlock();
        wake_.notify_all();
        for (std::thread &t : threads_) t.join();
    }
    std::size_t size() const { return threads_.size() + 1; }

    static void run(void *user, std::size_t n, kda_task task, void *context) {
        ThreadPool *pool = static_cast<ThreadPool *>(user);
        std::unique_lock<std::mutex> lock(pool->mutex_);
        pool->task_ = task, pool->context_ = context;
        pool->next_ = 0, pool->n_ = n, pool->left_ = n;
        pool->wake_.notify_all();
        pool->take(lock);
        pool->done_.wait(lock, [pool] { return pool->left_ == 0; });
    }

private:
    // Runs tasks while there are any; the lock is held except inside a task.
    void take(std::unique_lock<std::mutex> &lock) {
        while (next_ < n_) {
            std::size_t index = next_++;
            kda_task task = task_;
            void *context = context_;
            lock.unlock();
            task(context, index);
            lock.lock();
            if (--left_ == 0) done_.notify_all();
        }
    }
    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (!stop_) {
            take(lock);
            wake_.wait(lock, [this] { return stop_ || next_ < n_; });
        }
    }
    std::vector<std::thread> threads_;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    kda_task task_ = nullptr;
    void *context_ = nullptr;
    std::size_t next_ = 0, n_ = 0, left_ = 0;
    bool stop_ = false;
};

// ---- Requests ----

struct Request {
    std::size_t id = 0, prompt = 0, answer = 0; // tokens to read, tokens to make after them
    std::size_t done = 0;                       // tokens that state and window have seen
    std::ptrdiff_t slot = -1;
    std::uint64_t last = 0;                     // stands for the token that was sampled last
    std::vector<std::uint16_t> outputs;         // of every token, to compare
    std::vector<unsigned char> state;           // the final one, to compare

    std::size_t length() const { return prompt + answer; }
};

// In an engine: embed the token, run the layers before this one, project.
static void make_row(const Request &r, std::size_t position, std::uint16_t *row) {
    std::uint64_t seed = mix(r.id << 32 | position) ^ (position >= r.prompt ? r.last : 0);
    for (std::size_t i = 0; i < kRow; i++) row[i] = kda_to_bf16(from_bits(mix(seed + i)));
}

// In an engine: the layers after this one, and the sampler.
static void take_outputs(Request &r, const std::uint16_t *outputs, std::size_t tokens) {
    r.outputs.insert(r.outputs.end(), outputs, outputs + tokens * kOut);
    r.last = 0;
    for (std::size_t i = (tokens - 1) * kOut; i < tokens * kOut; i++)
        r.last = mix(r.last + outputs[i]);
    r.done += tokens;
}

// ---- One call ----

static void must(kda_result result) {
    if (result == KDA_OK) return;
    std::fprintf(stderr, "%s: %s\n", kda_result_name(result), kda_result_text(result));
    std::exit(1);
}

// Plug in your own tensors here: data, type, row width and head width of each are all there is to
// say. These are the columns of one bfloat16 row per token; the output is a tensor of its own.
static void run_layer(const Layer &layer, const std::vector<std::uint16_t> &rows,
                      std::vector<std::uint16_t> &out, const std::vector<kda_seq> &seqs,
                      const kda_run &run) {
    constexpr std::ptrdiff_t row = kRow, k = kK, v = kV;
    const std::uint16_t *x = rows.data();
    kda_layer_args args{};
    args.q = kda_in(x + kQAt, KDA_BF16, row, k);
    args.k = kda_in(x + kKAt, KDA_BF16, row, k);
    args.v = kda_in(x + kVAt, KDA_BF16, row, v);
    args.g = kda_in(x + kGAt, KDA_BF16, row, k);
    args.beta = kda_in(x + kBetaAt, KDA_BF16, row, 1);
    args.gate = kda_in(x + kGateAt, KDA_BF16, row, v);
    args.o = kda_out(out.data(), KDA_BF16, kOut, v);
    args.seqs = seqs.data(), args.n_seqs = seqs.size();
    must(kda_layer(&layer.desc, &args, &run));
}

// Recurrent: its bits do not depend on how prompts are cut into steps. Scratch is sized once.
static kda_run make_run(const Layer &layer, std::size_t n_seqs, ThreadPool *pool,
                        std::vector<unsigned char> &scratch) {
    kda_run run{};
    run.algorithm = KDA_RECURRENT;
    if (pool) run.parallel_for = ThreadPool::run, run.user = pool, run.n_threads = pool->size();
    run.scratch_bytes = kda_layer_scratch_bytes(&layer.desc, n_seqs, &run);
    scratch.resize(run.scratch_bytes);
    run.scratch = scratch.data();
    return run;
}

// ---- The engine ----

class Engine {
public:
    struct Counts {
        std::size_t steps = 0, prompt = 0, answer = 0, padding = 0;
    };
    Counts counts;

    Engine(const Layer &layer, std::size_t slots, ThreadPool &pool)
        : layer_(layer), state_bytes_(kda_state_bytes(&layer.desc.op)),
          window_bytes_(kda_layer_window_bytes(&layer.desc)), states_(slots * state_bytes_, 0xFF),
          windows_(slots * window_bytes_, 0xFF), running_(slots, nullptr),
          run_(make_run(layer, slots, &pool, scratch_)) {} // slots begin full of NaN

    void submit(Request &request) { waiting_.push_back(&request); }
    std::size_t busy() const {
        std::size_t n = waiting_.size();
        for (const Request *r : running_) n += r != nullptr;
        return n;
    }

    // Admits, batches, runs, retires. The number of sequences never changes, as engines with fixed
    // launch shapes have it: a slot without a request is one padding row.
    void step() {
        admit();
        rows_.clear(), seqs_.clear();
        std::size_t budget = kPrefillBudget;
        for (const Request *r : running_) {
            std::size_t n = 1;
            if (r && r->done < r->prompt) { // a piece of a prompt, as long as the budget lasts
                n = r->prompt - r->done < budget ? r->prompt - r->done : budget;
                budget -= n;
            }
            add_rows(r, n);
        }
        out_.assign(rows_.size() / kRow * kOut, 0);
        run_layer(layer_, rows_, out_, seqs_, run_);
        const std::uint16_t *outputs = out_.data();
        for (std::size_t i = 0; i < running_.size(); outputs += seqs_[i].n_tokens * kOut, i++)
            if (running_[i] && seqs_[i].n_tokens > 0) {
                take_outputs(*running_[i], outputs, seqs_[i].n_tokens);
                if (running_[i]->done == running_[i]->length()) retire(i);
            }
        counts.steps++;
    }

private:
    static constexpr std::size_t kPrefillBudget = 64; // tokens of prompts in a step

    void *state(std::ptrdiff_t slot) { return kda_slot(states_.data(), state_bytes_, slot); }
    void *window(std::ptrdiff_t slot) { return kda_slot(windows_.data(), window_bytes_, slot); }

    void admit() {
        for (std::size_t i = 0; i < running_.size() && !waiting_.empty(); i++) {
            if (running_[i]) continue;
            Request *r = running_[i] = waiting_.front();
            waiting_.pop_front();
            r->slot = static_cast<std::ptrdiff_t>(i);
            must(kda_state_clear(&layer_.desc.op, state(r->slot))); // the last owner's is gone
            std::memset(window(r->slot), 0, window_bytes_);
        }
    }
    // The next n tokens of a request (0 while prompts before it use up the budget), or padding.
    void add_rows(const Request *r, std::size_t n) {
        std::size_t first = rows_.size();
        rows_.resize(first + n * kRow, 0xFFFF); // padding rows are NaN: nobody may read them
        kda_seq seq{};
        seq.n_tokens = n;
        seq.state = state(r ? r->slot : -1);
        seq.window = window(r ? r->slot : -1);
        seqs_.push_back(seq);
        for (std::size_t t = 0; r && t < n; t++)
            make_row(*r, r->done + t, &rows_[first + t * kRow]);
        (r ? r->done < r->prompt ? counts.prompt : counts.answer : counts.padding) += n;
    }
    void retire(std::size_t i) {
        const auto *bytes = static_cast<const unsigned char *>(state(running_[i]->slot));
        running_[i]->state.assign(bytes, bytes + state_bytes_);
        running_[i] = nullptr;
    }

    const Layer &layer_;
    std::size_t state_bytes_, window_bytes_;
    std::vector<unsigned char> states_, windows_, scratch_; // scratch_ before run_, which fills it
    std::vector<Request *> running_;                        // one place for each slot
    std::deque<Request *> waiting_;
    kda_run run_;
    std::vector<std::uint16_t> rows_, out_;
    std::vector<kda_seq> seqs_;
};

// ---- The comparison ----

// A request alone, from zeros, one token to a call, in this thread.
static void run_alone(const Layer &layer, Request &r) {
    std::vector<unsigned char> window(kda_layer_window_bytes(&layer.desc), 0), scratch;
    std::vector<std::uint16_t> row(kRow), out(kOut);
    std::vector<kda_seq> seqs(1);
    kda_run run = make_run(layer, 1, nullptr, scratch);
    r.state.assign(kda_state_bytes(&layer.desc.op), 0);
    seqs[0].n_tokens = 1, seqs[0].state = r.state.data(), seqs[0].window = window.data();
    while (r.done < r.length()) {
        make_row(r, r.done, row.data());
        run_layer(layer, row, out, seqs, run);
        take_outputs(r, out.data(), 1);
    }
}

int main() {
    constexpr std::size_t kRequests = 24, kSlots = 6, kWorkers = 3;
    Layer layer;
    ThreadPool pool(kWorkers);
    Engine engine(layer, kSlots, pool);
    std::vector<Request> requests(kRequests), alone(kRequests);
    std::size_t tokens = 0;
    for (std::size_t i = 0; i < kRequests; i++) {
        Request &r = requests[i];
        r.id = i + 1;
        r.prompt = 1 + mix(3 * r.id) % (i % 3 ? 40 : 150); // a few long ones
        r.answer = mix(5 * r.id) % 60;
        alone[i] = r;
        tokens += r.length();
    }
    std::printf("ready: %zu requests, %zu tokens; %zu slots of %zu + %zu bytes; %zu threads\n",
                kRequests, tokens, kSlots, kda_state_bytes(&layer.desc.op),
                kda_layer_window_bytes(&layer.desc), pool.size());

    // Half of the requests are there at once, the others come in as time goes by.
    for (std::size_t arrived = 0; arrived < kRequests || engine.busy() > 0;) {
        if (arrived < kRequests && (arrived < kRequests / 2 || engine.counts.steps % 10 == 9))
            engine.submit(requests[arrived++]);
        if (arrived >= kRequests / 2) engine.step();
    }
    const Engine::Counts &c = engine.counts;
    std::printf("batched: %zu steps, one call each: %zu prompt, %zu answer, %zu padding rows\n",
                c.steps, c.prompt, c.answer, c.padding);

    std::size_t equal = 0;
    for (std::size_t i = 0; i < kRequests; i++) {
        run_alone(layer, alone[i]);
        bool same = alone[i].outputs == requests[i].outputs && alone[i].state == requests[i].state;
        if (!same) std::printf("request %zu differs\n", alone[i].id);
        equal += same;
    }
    std::printf("alone: %zu calls, one token each\n", tokens);
    if (equal != kRequests) return 1;
    std::printf("all %zu requests equal their one-by-one runs, bit for bit\n", equal);
    return 0;
}
